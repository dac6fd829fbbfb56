"""posttrain: reinforcement-learning post-training of language models."""

import os

__version__ = "0.1.0"

# PyTorch's threads wait for one another by spinning unless told otherwise. Beside any other process, or
# within a quota, they then spin while the one they wait for has no processor, and everything takes many times
# as long. OpenMP reads this once, when PyTorch is loaded, so posttrain is to be imported before torch.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ["OMP_WAIT_POLICY"] = "PASSIVE"
