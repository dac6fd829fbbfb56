"""Mathematical text as trees."""
