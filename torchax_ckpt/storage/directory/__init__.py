"""The directory of a run: which steps count, and who writes."""
