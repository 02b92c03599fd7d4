"""Telemetry: the record of what happened to a run, as events, statistics and files.

- ``events``: the kinds of event, and how an event is written as a line of JSON;
- ``stats``: counts of saves, and quantiles of their costs;
- ``journal``: the events as files, in ``DIRECTORY/events``;
- ``recorder``: takes events from other threads, and passes them to the user's function, the
  statistics and the journal;
- ``timeline``: the events of a directory as runs and saves, for reports.

Telemetry never makes a save or a restore fail or wait. An event that cannot be delivered or written
is logged and dropped.
"""
