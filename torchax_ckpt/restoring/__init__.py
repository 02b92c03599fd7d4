"""Restores and loads: from a step or from files, into live objects or to returned values."""
