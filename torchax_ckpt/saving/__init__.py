"""Saving: when a step is saved, what is written, and which threads and processes write it."""
