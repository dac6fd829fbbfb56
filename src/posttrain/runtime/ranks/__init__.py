"""Runs of several ranks."""
