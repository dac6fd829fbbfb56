"""Which task comes next, which groups may begin, and which groups an update learns from."""
