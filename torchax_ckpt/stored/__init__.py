"""Reading, comparing and copying stored steps, without torch and without JAX or Orbax arrays."""
