"""One verdict from several verifiers, and penalties to put beside them."""
