"""Prove theorems: the verifiers, moves and tasks of Coq and Lean."""
