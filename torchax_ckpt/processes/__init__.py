"""Lets the processes of a run exchange messages, and make equal decisions about saves."""
