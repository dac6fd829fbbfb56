"""Methods: choices of mathematics, put into tables."""
