"""Steps in the formats of other programs: safetensors, torch's files, state dicts.

Its modules know neither torchax nor devices, so they need no accelerator.
"""
