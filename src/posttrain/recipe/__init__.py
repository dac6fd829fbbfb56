"""A recipe: its tables, read from TOML into objects, and the rules for combining them."""
