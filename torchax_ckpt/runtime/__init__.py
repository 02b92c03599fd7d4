"""Process-level services of a checkpointer: call guard, signals, memory, progress, failures."""
