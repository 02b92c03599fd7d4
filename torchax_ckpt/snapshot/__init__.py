"""The snapshot of a save: references to device arrays, copies of them, and stacks of them."""
