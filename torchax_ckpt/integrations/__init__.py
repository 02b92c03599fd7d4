"""Integrations with training frameworks; each integration needs its own pip extra."""
