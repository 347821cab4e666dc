"""Ctrl-C that is not lost: libraries that are being imported may drop the KeyboardInterrupt that it becomes."""

import signal
import sys
from types import FrameType
from typing import NoReturn

_asked = False


def _note(number: int, frame: FrameType | None) -> NoReturn:
    global _asked
    _asked = True
    raise KeyboardInterrupt


def listen() -> None:
    """Take note of Ctrl-C from now on, and say nothing of those that are dropped."""
    signal.signal(signal.SIGINT, _note)
    sys.unraisablehook = _unless_interrupt


def _unless_interrupt(dropped: "sys.UnraisableHookArgs") -> None:
    if dropped.exc_type is not KeyboardInterrupt:
        sys.__unraisablehook__(dropped)


def asked() -> bool:
    """Whether Ctrl-C was pressed, even where something has dropped it; errors that follow are its consequence."""
    return _asked


def require_none() -> None:
    """Raise the KeyboardInterrupt again that something has dropped."""
    if asked():
        raise KeyboardInterrupt
