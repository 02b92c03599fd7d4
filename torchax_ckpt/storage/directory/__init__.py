"""Manages a run's directory: which of its steps are abandoned, and which program may write."""
