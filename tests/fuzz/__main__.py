"""Repeat one mutation, or search for longer than the tests do."""

import argparse
import collections
import tempfile
import time
from pathlib import Path

from fuzz.kinds import KINDS
from fuzz.run import Fuzzer


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("--kind", choices=KINDS)
    parser.add_argument("--number", type=int)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--count", type=int, default=50, help="mutations of each kind")
    asked = parser.parse_args()
    numbers = range(asked.count) if asked.number is None else [asked.number]
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        fuzzer = Fuzzer(Path(folder))
        begin = time.perf_counter()
        try:
            for name in [asked.kind] if asked.kind else KINDS:
                for number in numbers:
                    verdict = fuzzer.run(name, number, asked.seed)
                    outcomes["wrong" if verdict.wrong else verdict.outcome] += 1
                    if verdict.wrong or asked.number is not None:
                        print(verdict, flush=True)
        finally:
            fuzzer.reader.close()
    print(f"{dict(outcomes)} in {time.perf_counter() - begin:.0f} s")
    return 1 if outcomes["wrong"] else 0


if __name__ == "__main__":
    raise SystemExit(main())
