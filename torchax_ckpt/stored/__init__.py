"""Reads, compares and copies stored steps.

The modules of this package read arrays to the host, and use neither torch nor accelerators.
"""
