"""Writes the report of a run, which is an HTML page with charts."""
