"""benchmarks/former.py times two checkouts in turns; here, both are this one."""

import importlib.util
from pathlib import Path

import pytest

from fastweights import bench

ROOT = Path(__file__).parents[1]


@pytest.fixture
def former():
    spec = importlib.util.spec_from_file_location("former", ROOT / "benchmarks" / "former.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_two_checkouts_are_timed_in_turns(former, tmp_path, capfd):
    out = tmp_path / "bench.jsonl"
    former.main([str(ROOT), "--jobs", "strokes", "--threads", "1", "--turns", "1", "--out", str(out)])
    (line,) = bench.read(out)
    assert line["images"] == 80
    for work in ("train", "inference"):
        assert all(ms > 0 for ms in (*line[f"former_{work}_ms"], *line[f"{work}_ms"]))
        assert len(line[f"{work}_ms"]) == 1
        assert line[f"{work}_times_as_fast"] > 0
    assert "times  images/s" in capfd.readouterr().out


def test_a_folder_that_is_no_checkout_is_refused(former, tmp_path, capsys):
    with pytest.raises(SystemExit):
        former.main([str(tmp_path)])
    assert "has no src/fastweights" in capsys.readouterr().err


def test_code_from_elsewhere_is_not_taken_for_the_former(former, tmp_path, monkeypatch):
    (tmp_path / "src" / "fastweights").mkdir(parents=True)
    with pytest.raises(SystemExit, match="was imported, not the code"):
        former.main([str(tmp_path), "--answer", "strokes"])
