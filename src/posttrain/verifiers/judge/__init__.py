"""A language model as the judge: writers, rubrics, verdicts, and training data made by a judge."""
