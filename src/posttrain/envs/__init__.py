"""Environments: episodes of several turns, agents, and tools that a policy calls."""
