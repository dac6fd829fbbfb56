"""Evaluations: suites of problems, each asked in one fixed way, and what two of their results differ by."""
