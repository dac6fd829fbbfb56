"""What a person asks of a run."""
