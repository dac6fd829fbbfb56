"""Tasks that are made rather than read."""
