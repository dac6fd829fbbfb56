"""Generators of theorems."""
