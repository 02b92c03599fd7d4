"""How named leaves are laid out in storage: names, the storage plan, the manifest's form.

Knows neither torch nor devices.
"""
