"""Instructions that a program can check, as in IFEval: length, format, words, case, language."""
