"""Models: find, check, load, create and save them."""
