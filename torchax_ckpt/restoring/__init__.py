"""Restores a step or files into live objects; also loads a step and returns its state."""
