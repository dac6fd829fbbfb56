"""One verdict from several verifiers."""
