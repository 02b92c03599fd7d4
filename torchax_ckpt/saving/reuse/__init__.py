"""Lets a save reuse the files of an earlier step that hold frozen leaves."""
