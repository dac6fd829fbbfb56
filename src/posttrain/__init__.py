"""posttrain: reinforcement-learning post-training of language models."""

import os

__version__ = "0.1.0"

# PyTorch's threads wait for one another by spinning, for milliseconds. Beside any other process, or within a
# quota, they then spin while the one they wait for has no processor, and everything takes ten times as long.
# Where waiting ends in sleep at once, a virtual machine spends as much on waking up. So they spin briefly.
# OpenMP reads this when PyTorch is loaded: import posttrain before torch.
if not os.environ.keys() & {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"}:
    os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "2000"}
