"""The moment of a save: references, copies and stacks of device arrays."""
