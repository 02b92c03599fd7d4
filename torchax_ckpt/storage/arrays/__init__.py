"""The arrays of a step: written through Orbax, read through TensorStore, checked by digests."""
