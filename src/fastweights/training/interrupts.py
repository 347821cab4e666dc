"""Ctrl-C and SIGTERM as a wish to stop that is heard between two steps, rather than a blow in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from fastweights.utils.console import say

ANSWER = "Stopping after the running step or validation; Ctrl-C again stops at once, without saving."


class StopRequest:
    """Whether somebody asked to stop; they are answered at once, unless another process does so."""

    def __init__(self, *, answered: bool = True) -> None:
        self.asked, self.answered = False, answered
        self._answers: list[threading.Thread] = []

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Catch both signals for a while; a second Ctrl-C is not caught. Outside the main thread nothing is."""
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        former = {number: signal.signal(number, self._ask) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in former.items():
                signal.signal(number, handler)
            for answer in self._answers:
                answer.join()

    def _ask(self, number: int, frame: FrameType | None) -> None:
        first, self.asked = not self.asked, True
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if first and self.answered:
            # In a thread: a progress bar may hold the terminal, and wait for a lock of the code that is interrupted.
            self._answers = [threading.Thread(target=say, args=(ANSWER,))]
            self._answers[0].start()
