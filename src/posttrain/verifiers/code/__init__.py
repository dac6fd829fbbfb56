"""Programs judged by what they do: the verifier `Code`."""
