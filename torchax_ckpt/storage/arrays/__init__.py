"""The content of a step, through TensorStore and Orbax."""
