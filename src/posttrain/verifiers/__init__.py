"""Judges of responses: each returns a verdict, and a broken one is not a wrong answer."""
