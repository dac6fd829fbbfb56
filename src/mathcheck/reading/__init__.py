"""Parse mathematical text into trees."""
