"""Proofs in Coq."""
