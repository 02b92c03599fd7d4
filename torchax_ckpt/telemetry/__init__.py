"""Telemetry: the record of what happened to a run, as events, statistics and files.

It never makes a save or a restore fail or wait: an event that cannot be delivered or written is
logged and dropped.
"""
