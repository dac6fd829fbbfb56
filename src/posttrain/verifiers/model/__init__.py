"""Reward models as verifiers: the class `RewardModel`."""
