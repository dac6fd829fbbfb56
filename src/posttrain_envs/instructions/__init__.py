"""Instructions that a program can check, as IFEval has them: length, format, words, case, language."""
