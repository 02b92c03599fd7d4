"""Reads the arrays of a step and compares them with digests; sets Orbax up for writing them.

Arrays are read through TensorStore, but through Orbax if Orbax wrote the step without this package
(``foreign.py``).
"""
