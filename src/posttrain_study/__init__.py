"""Study what is known exactly: estimators by enumeration, and the classics of reinforcement learning."""
