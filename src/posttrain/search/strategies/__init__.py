"""Strategies: in which state the next move is drawn."""
