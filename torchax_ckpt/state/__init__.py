"""Captures the state of live torch objects as named leaves, and restores that state in place.

The modules of this package read and write no files; the package ``storage`` does.
"""
