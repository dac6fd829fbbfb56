"""A session, its two loops, and what they drive: samplers, weight syncs, checkpoints, ranks."""
