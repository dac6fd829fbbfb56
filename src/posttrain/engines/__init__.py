"""Engines: what draws tokens from a policy."""
