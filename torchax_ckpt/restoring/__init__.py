"""Restores a step, or weights from files, into attached objects; or returns a step's state."""
