"""Steps in the forms that other programs read and write: safetensors, torch's files, state dicts.

Knows neither torchax nor devices.
"""
