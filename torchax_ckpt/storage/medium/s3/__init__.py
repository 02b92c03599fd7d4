"""Accesses buckets of S3, and of the services that speak its protocol."""
