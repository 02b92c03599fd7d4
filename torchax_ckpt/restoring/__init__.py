"""Restores and loads: from a step, or from files, to live objects or returned values."""
