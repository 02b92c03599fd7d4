"""The storage layout of named leaves: names, the storage plan and the manifest.

This package knows neither torch nor devices.
"""
