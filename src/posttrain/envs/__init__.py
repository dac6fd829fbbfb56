"""Tasks, episodes of several turns, and conversations as tokens."""
