"""Runs the notebooks and writes what they print and draw back into them: `python notebooks/execute.py [NAME ...]`.

Outputs are committed, so that notebooks can be read without running them. A test runs them and compares.
"""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import nbformat
from nbclient import NotebookClient

from fastweights.utils.files import replacing

HERE = Path(__file__).parent
LIMIT = 300
"""Seconds that a cell may take, on a busy machine."""
QUIET = ["--log-level=ERROR"]
KERNEL = {"kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"}}


def notebooks() -> list[Path]:
    return sorted(HERE.glob("*.ipynb"))


def read(path: Path) -> nbformat.NotebookNode:
    return nbformat.read(path, as_version=4)


def executed(path: Path, folder: Path) -> nbformat.NotebookNode:
    """A notebook with the outputs of a run of now, in this folder; the first error is raised."""
    os.environ.setdefault("PYDEVD_DISABLE_FILE_VALIDATION", "1")  # no debugger, no warning about it
    book = read(path)
    here = {"metadata": {"path": str(folder)}}
    NotebookClient(book, timeout=LIMIT, kernel_name="python3", resources=here, extra_arguments=QUIET).execute()
    for cell in book.cells:
        cell.metadata.clear()  # when each cell was run changes nothing
    book.metadata = nbformat.from_dict(KERNEL)
    return book


def main(names: Sequence[str]) -> None:
    there = [path.stem for path in notebooks()]
    for name in names:
        if name not in there:
            sys.exit(f"there is no notebook {name}; name some of {', '.join(there)}, or none for all.")
    for path in notebooks():
        if names and path.stem not in names:
            continue
        book = executed(path, HERE)
        with replacing(path) as draft:
            nbformat.write(book, draft)
        print(f"{path.name}: {sum(cell.cell_type == 'code' for cell in book.cells)} cells run")


if __name__ == "__main__":
    main(sys.argv[1:])
