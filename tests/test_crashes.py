"""Killed at any write, rename or fsync, or out of disk there, a run ends like one left alone: see faults.py."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs fork and /proc"),
    pytest.mark.timeout(1800),  # a hundred short trainings, on a busy machine too
]

EVERY = pytest.mark.slow


def struck(what: str, kind: str, folder: Path, stride: int) -> list[dict]:
    """What came of a command that was struck at every `stride`-th operation on a file."""
    program = [sys.executable, str(Path(__file__).with_name("faults.py")), what, kind, str(folder), str(stride)]
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "FASTWEIGHTS_DATA": str(folder / "elsewhere"), "COLUMNS": "500"}
    done = subprocess.run(program, capture_output=True, text=True, env=alone, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize(
    ("what", "stride"),
    [("train", 33), pytest.param("train", 1, marks=EVERY), pytest.param("prepare", 1, marks=EVERY)],
)
def test_a_command_killed_anywhere_ends_as_if_it_had_not_been(tmp_path, what, stride):
    rows = struck(what, "kill", tmp_path, stride)
    assert len(rows) >= (20 if stride == 1 else 2)
    for row in rows:
        assert row["code"] == -9, row
        assert (row["then"], row["different"]) == (0, []), row


@pytest.mark.parametrize(
    ("what", "stride"),
    [("prepare", 13), pytest.param("train", 1, marks=EVERY), pytest.param("prepare", 1, marks=EVERY)],
)
def test_a_full_disk_is_one_sentence_and_leaves_nothing_half_written(tmp_path, what, stride):
    rows = struck(what, "full", tmp_path, stride)
    assert len(rows) >= (20 if stride == 1 else 2)
    for row in rows:
        if row["code"] == 0:  # what could not be written was of no importance
            assert row["was_done"], row
        else:
            assert row["code"] == 2, row
            assert row["said"].count("error: ") == 1, row
            assert row["said"].endswith(".\n"), row
        assert "Traceback" not in row["said"], row
        assert not any(".draft" in name for name in row["left"]), row
        assert (row["then"], row["different"]) == (0, []), row
