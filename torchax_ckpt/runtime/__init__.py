"""The process around a checkpointer: calls, signals, progress, failures, the save in flight."""
