"""Proofs in Coq: a verifier, its sessions, and the moves of a search."""
