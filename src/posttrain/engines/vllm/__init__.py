"""vLLM as a sampling engine."""
