"""The command ``watch``."""
