"""Restores into live objects, and loads as returned values, from a step or from files."""
