"""The page's script: typed, small, and plain."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fastweights.server.app import PAGE

HERE = Path(__file__).parent
SCRIPTS = sorted(Path(str(PAGE)).glob("*.js"))
OXLINT = shutil.which("oxlint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}")


@pytest.mark.skipif(shutil.which("tsc") is None, reason="there is no tsc here; apt install node-typescript")
def test_types_are_right_and_nothing_is_unused():
    version = subprocess.run(["tsc", "--version"], capture_output=True, text=True).stdout.split()[-1]
    how = "node" if int(version.split(".")[0]) < 5 else "bundler"
    command = ["tsc", "-p", str(HERE / "jsconfig.json"), "--moduleResolution", how]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout


@pytest.mark.skipif(OXLINT is None, reason="there is no oxlint here; pip install oxlint")
def test_the_linter_has_nothing_to_say():
    assert OXLINT is not None
    command = [OXLINT, "--config", str(HERE / "oxlintrc.json"), str(PAGE)]
    checked = subprocess.run(command, capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    assert f"on {len(SCRIPTS)} files" in checked.stdout


def test_it_is_small_and_keeps_to_a_few_rules():
    assert sum(path.stat().st_size for path in SCRIPTS) < 50_000
    for path in SCRIPTS:
        text = path.read_text(encoding="utf-8")
        assert text.startswith("// @ts-check\n/**"), path.name
        for never in (r"\bvar ", r"[^=!]==[^=]", r"!=[^=]", "innerHTML", r"\beval\(", "document.write", "console."):
            assert not re.search(never, text), (path.name, never)
        assert max(map(len, text.split("\n"))) <= 120, path.name
