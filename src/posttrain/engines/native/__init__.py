"""The native sampling engine: continuous batching over a key-value cache."""
