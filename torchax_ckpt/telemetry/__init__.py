"""Telemetry: the record of what happened to a run, as events, statistics and files.

- ``events``: the kinds of event, and how an event is written as a line of JSON;
- ``stats``: counts of saves, and quantiles of their costs;
- ``journal``: the events as files, in ``DIRECTORY/events``;
- ``recorder``: receives events from other threads, and handles them on a separate thread;
- ``hook``: the user's function that is called with each event;
- ``timeline``: the events of a directory as runs and saves, for reports.

Telemetry never makes a save or a restore fail or wait. An event that cannot be delivered or written
is logged and dropped.
"""
