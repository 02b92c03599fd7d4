"""Converts live torch objects to named leaves, and restores them in place, without storage."""
