"""Several trainings side by side in one program: each has its turn, a few steps at a time.

A small step leaves most of a GPU idle. Here every training keeps weights, optimiser, graph, folder and log of its own,
and queues its steps on a stream of its own, so that the GPU works on all of them at once. Whoever has to wait for the
device, to log or to validate, waits while the others' steps run. Nothing is shared but the items: each training takes
the very steps that it would have taken alone.
"""

import time
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from itertools import islice
from typing import Generic, TypeVar

import torch

from fastweights.utils.errors import UserError

TURNS_AHEAD = 4
"""How many turns' work of one training may wait for the device: enough for it while another one validates."""
POLL_SECONDS = 5e-5
"""How long to look away while every training waits for the device."""
Name = TypeVar("Name")
Result = TypeVar("Result")
Turns = Generator[bool, int | None, Result]
"""Work in turns, as `Training.visits`: yields whether what comes next waits for the device, is told how many take turns
and returns a result."""


def side_by_side(
    works: Iterable[tuple[Name, Turns[Result]]], device: torch.device, at_once: int | None = None
) -> Iterator[tuple[Name, Result | UserError]]:
    """Do all works by turns: the result or the error of each, with its name, as it ends, while the others go on.

    With `at_once` no more than so many have begun; when one ends, the next takes its place.
    """
    waiting = ((name, Lane(work, device)) for name, work in works)
    lanes = list(islice(waiting, at_once))
    try:
        while lanes:
            ready = [(name, lane) for name, lane in lanes if lane.ready()]
            for name, lane in ready:
                ended = lane.turn(len(lanes))
                if ended is not None:
                    lanes = [pair for pair in lanes if pair[1] is not lane]
                    yield name, ended[0]
                    lanes += islice(waiting, 1)
            if not ready:
                time.sleep(POLL_SECONDS)
    finally:
        for _, lane in lanes:
            lane.work.close()


def in_one_go(work: Turns[Result]) -> Result:
    """Do a work alone."""
    while True:
        try:
            next(work)
        except StopIteration as end:
            return end.value


class Lane(Generic[Result]):
    """One of the works, and what of it the device has not done yet."""

    def __init__(self, work: Turns[Result], device: torch.device) -> None:
        self.work = work
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self.queued: deque[torch.cuda.Event] = deque()
        self.waits, self.begun = False, False

    def ready(self) -> bool:
        """Whether it is worth a turn: the device has done all of it or, where it need not wait, all but little."""
        while self.queued and self.queued[0].query():
            self.queued.popleft()
        return len(self.queued) < (1 if self.waits else TURNS_AHEAD)

    def turn(self, lanes: int) -> tuple[Result | UserError] | None:
        """Have it go on for a while; its result or error once it has ended."""
        try:
            with self._on_its_stream():
                self.waits = self.work.send(lanes if self.begun else None)
                self.begun = True
                if self.stream is not None:
                    self.queued.append(self.stream.record_event())
        except StopIteration as end:
            return self._ended(end.value)
        except UserError as error:  # a NaN loss, for example: the others go on
            return self._ended(error)
        return None

    def _on_its_stream(self) -> AbstractContextManager[object]:
        return nullcontext() if self.stream is None else torch.cuda.stream(self.stream)

    def _ended(self, how: Result | UserError) -> tuple[Result | UserError]:
        if self.stream is not None:
            self.stream.synchronize()  # what it leaves behind is used on other streams
        return (how,)
