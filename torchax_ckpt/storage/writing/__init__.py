"""Writes the arrays of a step: moves them from the devices through the host to storage."""
