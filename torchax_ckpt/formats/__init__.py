"""Reads and writes weights in formats of other programs: safetensors, torch's files and DCP.

The modules of this package use neither torchax nor devices, so they need no accelerator.
"""
