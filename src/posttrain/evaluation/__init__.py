"""Evaluate models, judge answers, compare policies and measure changes of weights."""
