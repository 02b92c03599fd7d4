"""Captures live torch objects as named leaves, and restores them in place; touches no files."""
