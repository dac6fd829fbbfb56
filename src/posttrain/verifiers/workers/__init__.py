"""Calls in other processes, under a deadline."""
