"""The storage layout of named leaves: names, the storage plan and the manifest.

The modules of this package import neither torch nor JAX.
"""
