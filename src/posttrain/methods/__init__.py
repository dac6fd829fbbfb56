"""Methods: each is a choice of functions of math/, one line of table.py."""
