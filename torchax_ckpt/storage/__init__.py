"""Where checkpoints are stored: directories, steps and arrays. The only package that imports Orbax.

Nothing here imports torch. A step is a directory named by its number. Orbax writes and commits the
step, which has three items:

    state     the arrays, ``{component: {rest of the name: array}}``
    manifest  the JSON that describes them (``layout/manifest.py``)
    summary   small JSON: the metrics, and which newer steps this step abandons
"""
