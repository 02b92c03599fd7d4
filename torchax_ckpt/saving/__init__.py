"""The life of a save."""
