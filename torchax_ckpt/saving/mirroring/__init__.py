"""Copies the steps of a run to a second place while it trains, and fetches them from there."""
