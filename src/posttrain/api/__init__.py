"""posttrain from Python: recipes made of objects, sessions, and finished runs (docs/python.md)."""
