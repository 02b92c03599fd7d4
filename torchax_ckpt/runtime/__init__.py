"""The process that a checkpointer runs in: calls, signals, memory, progress, failures."""
