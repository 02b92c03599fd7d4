"""Conversion of live torch objects to named leaves, and back in place. No access to storage."""
