"""Evaluate a model on suites of problems, each asked in a fixed way, and compare the results."""
