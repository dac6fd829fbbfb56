"""Child processes: programs, calls in another process, and pools of these."""
