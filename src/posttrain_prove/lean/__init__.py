"""Proofs in Lean: a verifier, its toolchains, and the moves of a search."""
