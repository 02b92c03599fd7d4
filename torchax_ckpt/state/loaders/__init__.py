"""Data loaders: their protocols, and their states when the number of processes changes."""
