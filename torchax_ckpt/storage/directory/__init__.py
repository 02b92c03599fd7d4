"""Manages the directory of a run: which of its steps count, and which process may write."""
