"""Judge by reward models: the verifier `RewardModel`."""
