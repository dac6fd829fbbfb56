"""Where untrusted programs run: `Box` starts them, `available` says how well this host can hold them."""

from posttrain.verifiers.sandbox.box import Box, Limits, Ran
from posttrain.verifiers.sandbox.host import LEVELS, Level, available, require
from posttrain.verifiers.sandbox.live import Live

__all__ = ["LEVELS", "Box", "Level", "Limits", "Live", "Ran", "available", "require"]
