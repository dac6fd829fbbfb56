"""The two loops, and where they run."""
