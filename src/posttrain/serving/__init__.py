"""A model behind the OpenAI chat API, for this machine."""
