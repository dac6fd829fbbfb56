"""An example plugin of posttrain (docs/write-a-plugin.md)."""
