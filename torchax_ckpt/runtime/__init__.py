"""Guards calls, detects preemptions, finds the host memory, shows progress, logs failures."""
