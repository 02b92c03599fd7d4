"""Accesses files and folders on one medium: a local file system or a bucket."""
