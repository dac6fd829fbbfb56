"""Sampling engines, which draw tokens from a policy."""
