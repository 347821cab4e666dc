"""What would be published: a wheel and a source archive that a package index takes, with everything in them."""

import importlib.util
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(
    any(importlib.util.find_spec(tool) is None for tool in ("build", "twine")),
    reason="build and twine are not installed; make package",
)


@pytest.mark.slow
def test_it_can_be_built_and_published(tmp_path):
    source, dist = tmp_path / "source", tmp_path / "dist"  # a copy: building leaves folders beside what is built
    shutil.copytree(ROOT / "src", source / "src", ignore=shutil.ignore_patterns("__pycache__", "*.egg-info"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for command in (["build", "--no-isolation", "--outdir", dist, source], ["twine", "check", "--strict"]):
        files = sorted(dist.iterdir()) if command[0] == "twine" else []
        done = subprocess.run([sys.executable, "-m", *command, *files], capture_output=True, text=True, timeout=280)
        assert done.returncode == 0, done.stdout + done.stderr
    (wheel,) = dist.glob("*.whl")
    held = set(zipfile.ZipFile(wheel).namelist())
    package = (path for path in (source / "src" / "fastweights").rglob("*") if path.is_file())
    assert {path.relative_to(source / "src").as_posix() for path in package} <= held
    assert "fastweights/classifier/shipped/drawings.safetensors" in held
