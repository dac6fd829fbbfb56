"""Which task comes next, and which groups an update learns from."""
