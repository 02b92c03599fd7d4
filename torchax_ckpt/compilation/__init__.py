"""Keeps the programs that JAX compiles on this machine, and carries them to the next."""
