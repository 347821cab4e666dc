"""No mutated file passes for another one, ends in a traceback, hangs or eats the memory: see `fuzz`."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from fuzz.kinds import KINDS
from fuzz.run import Fuzzer

EACH = 120
"""Mutations of each kind of file, half of them signed."""


@pytest.fixture(scope="module")
def fuzzer(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fuzzer]:
    fuzzer = Fuzzer(tmp_path_factory.mktemp("fuzz"))
    yield fuzzer
    fuzzer.reader.close()


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("kind", KINDS)
def test_nothing_damaged_or_hostile_passes(fuzzer: Fuzzer, kind: str) -> None:
    verdicts = [fuzzer.run(kind, number, seed=0) for number in range(EACH)]
    wrong = [str(verdict) for verdict in verdicts if verdict.wrong]
    assert not wrong, "\n".join(["", *wrong])
    assert sum(verdict.outcome == "refused" for verdict in verdicts) > (0 if KINDS[kind].forgiving else EACH // 4)
    assert len({verdict.what for verdict in verdicts}) > EACH * 3 // 4


def test_the_list_of_kinds_is_long_enough() -> None:
    assert EACH * len(KINDS) >= 500


def test_a_reader_that_dies_is_told_of_and_started_again(fuzzer: Fuzzer, tmp_path: Path) -> None:
    path = KINDS["ledger"].make(tmp_path)
    assert fuzzer.reader.read("no such kind", path)[0] == "traceback"
    fuzzer.reader.process.kill()
    assert fuzzer.reader.read("ledger", path)[0] == "died"
    assert fuzzer.reader.read("ledger", path)[0] == "read"
