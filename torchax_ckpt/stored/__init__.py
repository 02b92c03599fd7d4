"""Steps as files, read without torch, JAX or Orbax arrays."""
