"""Writes the arrays of a step through Orbax; reads and checks arrays through TensorStore."""
