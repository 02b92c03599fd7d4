"""Keeps averages of a model's weights while it trains."""
