"""Other programs' loops around this library's public names; each needs an extra of its own."""
