"""What a move is, and what it leads to."""
