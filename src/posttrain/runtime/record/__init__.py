"""What a run writes down, and goes on from."""
