"""Where checkpoints lie: the only room that imports Orbax. Knows nothing of torch.

A step is a directory named by its number, written and committed by Orbax, with three items:

    state     the arrays, ``{component: {rest of the name: array}}``
    manifest  the JSON that explains them (``layout/manifest.py``)
    summary   small JSON: metrics, and which newer steps this one abandons
"""
