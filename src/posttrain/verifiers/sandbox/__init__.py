"""Sandboxes: `Box` runs untrusted programs, `available` returns which isolation levels the host supports."""

from posttrain.verifiers.sandbox.box import Box, Limits, ProgramResult
from posttrain.verifiers.sandbox.host import LEVELS, Level, available, require
from posttrain.verifiers.sandbox.live import Live

__all__ = ["LEVELS", "Box", "Level", "Limits", "Live", "ProgramResult", "available", "require"]
