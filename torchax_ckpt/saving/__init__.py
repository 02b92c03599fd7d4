"""Saving: when a step is saved, what is written, and the threads and processes that write it."""
