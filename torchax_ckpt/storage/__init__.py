"""Stores checkpoints: the directories of runs, the steps in them, and the arrays of the steps.

Only this package and the package ``torchax_ckpt.policies`` import Orbax. No module of this package
imports torch. Each step is a directory whose name is the number of the step, or ``incoming-`` and
the number (``directory/abandonment.py`` tells why). Orbax writes and commits the three items of a
step:

    state     the arrays as a pytree, ``{component: {rest of the array's name: array}}``
    manifest  the JSON object that describes the arrays (``layout/manifest.py``)
    summary   a small JSON object that holds the metrics and lists the steps that this step abandons
"""
