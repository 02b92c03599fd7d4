"""Reads and writes weights in formats of other programs: safetensors, torch's files and DCP.

The modules in ``torchax_ckpt.formats`` use neither torchax nor devices and need no accelerator.
"""
