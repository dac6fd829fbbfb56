"""posttrain from Python: recipes made of objects, sessions, and runs that are looked at (docs/python.md)."""
