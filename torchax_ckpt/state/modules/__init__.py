"""Captures and restores attached modules."""
