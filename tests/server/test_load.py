"""The load test runs, for a moment."""

import json
import runpy
from pathlib import Path

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "serve.py"


def test_clients_are_answered_without_an_error(tmp_path, monkeypatch):
    script = runpy.run_path(str(SCRIPT))
    monkeypatch.setitem(script["measure"].__globals__, "CLASSES", 5)
    lines = script["measure"]([1, 8], 0.5, 1.0, alone=0.2)
    assert [line["clients"] for line in lines] == [1, 8]
    for line in lines:
        assert line["errors"] == 0
        assert line["requests"] > 0
        assert line["p50_ms"] <= line["p95_ms"] <= line["p99_ms"]
        json.dumps(line)
