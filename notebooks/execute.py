"""Runs the notebooks beside it and keeps what they print and draw.

make notebooks
"""

from __future__ import annotations

import os
import re
import sys
import tempfile
from pathlib import Path

import nbformat
from nbclient import NotebookClient

NOTEBOOKS = sorted(Path(__file__).parent.glob("*.ipynb"))


def run(path: Path, folder: Path) -> nbformat.NotebookNode:
    """The notebook as it is after running it from top to bottom in a folder.

    Raises:
      nbclient.exceptions.CellExecutionError: a cell raised.
    """
    notebook = nbformat.read(path, as_version=4)
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=240, startup_timeout=240, resources=resources).execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # when it ran, which would change with every run
        if "outputs" in cell:
            cell.outputs = [output for output in map(_kept, cell.outputs) if output is not None]
    notebook.metadata = nbformat.from_dict(
        {
            "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
            "language_info": {"name": "python"},
        }
    )
    return notebook


def _kept(output: nbformat.NotebookNode) -> nbformat.NotebookNode | None:
    """What to keep of an output: not the folder of this execution, where a new run is said."""
    if output.output_type == "stream" and output.name == "stderr":
        output.text = re.sub(r"^torchax_ckpt: new run in .*\n", "", output.text, flags=re.M)
        return output if output.text else None
    return output


def main() -> None:
    """Rewrites each notebook, with the outputs of this run."""
    os.environ.setdefault("MIRROR", "mirror")  # a folder plays it; the tests have a bucket
    for path in NOTEBOOKS:
        print(path.name, file=sys.stderr)
        with tempfile.TemporaryDirectory() as folder:
            nbformat.write(run(path, Path(folder)), path)


if __name__ == "__main__":
    main()
