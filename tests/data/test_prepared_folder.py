"""Where prepared folders lie, and that their manifests are read as they were written."""

import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from fastweights.data.prepared import MANIFEST, prepared_folder, read_manifest, save


def test_manifest_does_not_depend_on_the_locale(tmp_path: Path) -> None:
    code = "import sys; from pathlib import Path; from fastweights.data.prepared import save;"
    code += "save(Path(sys.argv[1]), {}, {'class': '\\u30a2'})"
    environment = {**os.environ, "LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "set")], env=environment, check=True)
    manifest = read_manifest(tmp_path / "set")
    assert manifest is not None
    assert manifest["class"] == "ア"


def test_read_only_root_keeps_what_is_prepared_in_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    root = tmp_path / "root"
    save(prepared_folder(root, "old"), {}, {})
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert prepared_folder(root, "old") == root / "prepared" / "old"
    assert prepared_folder(root, "new").parent == tmp_path / "cache" / "fastweights" / "prepared"


def test_the_disk_has_all_of_a_folder_before_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []
    fsync, rename = os.fsync, Path.rename

    def synced(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def renamed(draft: Path, folder: Path) -> Path:
        done.append("renamed")
        return rename(draft, folder)

    monkeypatch.setattr(os, "fsync", synced)
    monkeypatch.setattr(Path, "rename", renamed)
    save(tmp_path / "data", {"a": np.arange(3), "b": np.arange(4)}, {})
    assert set(done[: done.index("renamed")]) == {"a.npy", "b.npy", MANIFEST, ".data.draft"}
    assert done[done.index("renamed") + 1 :] == [tmp_path.name]
