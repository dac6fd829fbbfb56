"""Take tasks, environments and verifiers from other libraries, and games."""
