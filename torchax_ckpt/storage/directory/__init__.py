"""The directory of a run: which steps count, and which process may write."""
