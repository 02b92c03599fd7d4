"""Publishes the steps of a run while the run goes on."""
