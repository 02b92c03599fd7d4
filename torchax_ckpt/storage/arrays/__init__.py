"""Writes the arrays of a step through Orbax; reads arrays and compares them with digests.

Arrays are read through TensorStore, but through Orbax if Orbax wrote the step without this package
(``foreign.py``).
"""
