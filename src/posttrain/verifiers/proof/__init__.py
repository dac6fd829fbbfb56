"""Proofs, checked by the proof assistants themselves: Coq and Lean."""
