"""Reads, compares and copies stored steps as host arrays, without torch and without devices."""
