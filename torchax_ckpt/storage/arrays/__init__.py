"""Reads the arrays of a step and compares them with digests; cuts arrays into chunks and blocks."""
