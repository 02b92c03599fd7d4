"""Access to one path on one medium: a local file system or a bucket."""
