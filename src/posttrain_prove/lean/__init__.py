"""Proofs in Lean."""
