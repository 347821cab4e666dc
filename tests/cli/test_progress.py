"""Progress bars of trainings at the same time share one display."""

import io

from rich.console import Console

from fastweights.cli.progress import ProgressBar

TRAIN = {"event": "train", "step": 5, "loss": 1.25, "accuracy": 0.5, "tasks_per_second": 1234.0, "done": 0.5}


def test_bars_open_at_the_same_time_share_a_display():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120)
    first, second = ProgressBar(console, "seed 0"), ProgressBar(console, "seed 1")
    first.write(TRAIN)
    second.write({**TRAIN, "loss": 2.5})
    assert first._progress is second._progress
    first.close()
    second.write({"event": "testing", "step": 5, "tasks": 600})
    assert second._progress.live.is_started
    second.close()
    shown = out.getvalue()
    assert all(text in shown for text in ("seed 0", "loss 1.250", "seed 1", "answering 600 test tasks"))
    third = ProgressBar(console, "another")
    assert third._progress is not first._progress
    third.close()
