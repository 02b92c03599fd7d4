"""Owns the record of what happened to a run: told to whoever asks, counted, and kept beside it.

- ``events``: what can happen, and its form as a line of JSON;
- ``stats``: counts and quantiles of what saves cost;
- ``journal``: the events in the directory, in ``DIRECTORY/events``;
- ``recorder``: takes events from the threads where things happen, off which it does the rest;
- ``timeline``: the events of a directory as runs and saves, for whoever draws them.

Nothing here may cost a save or a restore: what cannot be told or written is logged and left out.
"""
