"""How Sphinx builds these pages: ``make docs``. Warnings are errors."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path

# The reference is read from the package's docstrings: importing it starts no accelerator.
os.environ["JAX_PLATFORMS"] = "cpu"

# Sphinx reads one folder: the notebooks are copied into it, where git ignores them, and what they
# link to is nearer there.
COPIES = Path(__file__).parent / "notebooks"
COPIES.mkdir(exist_ok=True)
for notebook in (Path(__file__).parents[1] / "notebooks").glob("*.ipynb"):
    (COPIES / notebook.name).write_text(notebook.read_text().replace("](../docs/", "](../"))

project = "torchax_ckpt"
author = "the authors of torchax_ckpt"
release = importlib.metadata.version("torchax-ckpt")

extensions = ["myst_nb", "sphinx.ext.autodoc", "sphinx.ext.napoleon"]
html_theme = "furo"
html_title = f"torchax_ckpt {release}"

# Code without a language is a listing of files or a message.
highlight_language = "text"
myst_heading_anchors = 3
nb_execution_mode = "off"  # the tests run them; what they kept is shown

autodoc_member_order = "bysource"
autodoc_typehints = "signature"
autodoc_inherit_docstrings = False
napoleon_numpy_docstring = False
napoleon_use_ivar = True  # what a docstring says of attributes is their only documentation

# Every name of this package that a docstring refers to must be in the reference; those of Python,
# torch and JAX are on other sites.
nitpicky = True
nitpick_ignore_regex = [("py:.*", r"(?!torchax_ckpt).*")]
