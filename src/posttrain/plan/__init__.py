"""What a run will do and need, worked out and checked before weights are read."""
