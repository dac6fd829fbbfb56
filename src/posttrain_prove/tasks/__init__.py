"""Generators of theorems to prove: exercises, and random theorems."""
