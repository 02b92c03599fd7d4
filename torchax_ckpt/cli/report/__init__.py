"""The report of a run: an HTML page with charts."""
