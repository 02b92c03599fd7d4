"""The life of a restore."""
