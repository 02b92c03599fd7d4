"""Steps in the formats of other programs: safetensors, torch's files, state dicts.

The modules of this package use neither torchax nor devices, so they need no accelerator.
"""
