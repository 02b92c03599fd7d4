"""Stores checkpoints: the directories of runs, the steps in them, and the arrays of the steps."""
