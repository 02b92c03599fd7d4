"""Defines how named leaves are stored: their names, the storage plan and the manifest.

The modules of this package import neither torch nor JAX.
"""
