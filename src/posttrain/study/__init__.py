"""What can be enumerated: estimators' truth, and classic reinforcement learning."""
