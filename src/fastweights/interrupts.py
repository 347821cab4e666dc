"""Ctrl-C and SIGTERM as a wish to stop that is heard between two steps, rather than a blow in the middle of one."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType


class StopRequest:
    """Whether somebody asked to stop."""

    asked = False

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

    def _ask(self, number: int, frame: FrameType | None) -> None:
        self.asked = True
        signal.signal(signal.SIGINT, signal.default_int_handler)
