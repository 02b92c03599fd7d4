"""Snapshots of device arrays for saves; the placements of arrays, and moves between them."""
