"""Reinforcement learning before language models, each learner next to the exact optimum it must reach.

Small enough to compute: bandits, finite decision problems, a maze. `mdp.py` is the oracle; every
learner in this folder is compared with it, by its example (`python -m posttrain_study.classic NAME`)
and by its tests.
"""
