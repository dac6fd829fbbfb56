"""Judge programs by running them: the verifier `Code`."""
