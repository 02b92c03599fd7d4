"""Integrations with training frameworks, each installed with its own extra."""
