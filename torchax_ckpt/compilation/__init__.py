"""What JAX compiles, kept on this machine and carried to the next."""
