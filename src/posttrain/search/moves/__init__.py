"""Transitions: what a move is, and the state that it leads to."""
