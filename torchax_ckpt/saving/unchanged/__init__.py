"""Knows what did not change since earlier saves, and where the steps of the run store it."""
