"""What JAX compiles, kept for the next start."""
