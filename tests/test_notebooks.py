"""The notebooks run, and what is committed of their outputs is what they print and draw today."""

import re
import runpy
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NOTEBOOKS = ("first_steps", "inside_the_memory", "your_own_method")
SILENT = re.compile(r"/work|/tmp|/root|/home|/Users|\.venv|site-packages|Warning|Traceback|np\.str_")
"""What no reader wants to see in an output: folders of somebody's machine, and what went wrong there."""

runner = runpy.run_path(str(ROOT / "notebooks" / "execute.py"))


def outputs(notebook) -> list[list[tuple[str, str]]]:
    """Of each cell what it put out: kinds, and texts without their numbers, which machines round differently."""
    return [merged(cell.outputs) for cell in notebook.cells if cell.cell_type == "code"]


def merged(parts) -> list[tuple[str, str]]:
    made: list[tuple[str, str]] = []
    for part in parts:
        if part.output_type == "stream":
            if made and made[-1][0] == part.name:  # however many pieces it came in
                made[-1] = (part.name, made[-1][1] + part.text)
            else:
                made.append((part.name, part.text))
        else:
            made.append((sorted(part.data)[0], "" if "image/png" in part.data else part.data["text/plain"]))
    return [(kind, re.sub(r"[-+]?\d+(\.\d+)?", "0", " ".join(text.split()))) for kind, text in made]


def test_these_are_all_notebooks_there_are():
    assert tuple(path.stem for path in runner["notebooks"]()) == NOTEBOOKS


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_outputs_are_committed_and_speak_of_no_machine(name):
    notebook = runner["read"](ROOT / "notebooks" / f"{name}.ipynb")
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in code] == list(range(1, len(code) + 1)), "run it from top to bottom"
    assert sum(bool(cell.outputs) for cell in code) >= 3
    assert any("image/png" in part.get("data", {}) for cell in code for part in cell.outputs)
    said = "\n".join(str(part.get("text", "")) + str(part.get("data", {}).get("text/plain", ""))
                     for cell in code for part in cell.outputs)  # fmt: skip
    assert not SILENT.search(said), SILENT.search(said)
    assert not any(part.output_type == "stream" and part.name == "stderr" for cell in code for part in cell.outputs)


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_runs_and_says_what_is_committed(name, tmp_path, monkeypatch, loaded_strokes):
    monkeypatch.setenv("FASTWEIGHTS_DATA", str(loaded_strokes.root))
    monkeypatch.setenv("JUPYTER_PLATFORM_DIRS", "1")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    path = ROOT / "notebooks" / f"{name}.ipynb"
    fresh, committed = outputs(runner["executed"](path, tmp_path)), outputs(runner["read"](path))
    if name == "your_own_method":  # who is ahead may depend on how a machine rounds
        fresh, committed = (
            [[(k, t.partition("points:")[0]) for k, t in cell] for cell in of] for of in (fresh, committed)
        )
    assert fresh == committed
    assert list(tmp_path.iterdir()) == [], "a notebook leaves no files"
