"""Ctrl-C while packages are imported: some of them take it for an error of their own, or go on without a part."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any


class _Handler:
    """A handler of SIGINT that raises ``KeyboardInterrupt``, as Python's own does, and remembers that it has."""

    def __init__(self) -> None:
        self.pressed = False

    def __call__(self, number: int, frame: FrameType | None) -> None:
        self.pressed = True
        signal.default_int_handler(number, frame)


@contextmanager
def remembered() -> Iterator[None]:
    """A context in which Ctrl-C is a ``KeyboardInterrupt``, also if code in it has made another exception of that.

    A handler that other code has set stays, and so does any in another thread than the main one.
    """
    before: Any = signal.getsignal(signal.SIGINT)
    handler = before if isinstance(before, _Handler) else _Handler()
    if before is signal.default_int_handler:
        try:
            signal.signal(signal.SIGINT, handler)
        except ValueError:  # not the main thread
            before = None
    try:
        yield
    except Exception:
        if handler.pressed:
            raise KeyboardInterrupt from None
        raise
    finally:
        if before is signal.default_int_handler and signal.getsignal(signal.SIGINT) is handler:
            signal.signal(signal.SIGINT, before)


def leave_to_script() -> None:
    """Give Ctrl-C back to Python's own handler.

    Raises:
        KeyboardInterrupt: it was pressed before, and code has gone on without a word.
    """
    handler = signal.getsignal(signal.SIGINT)
    if isinstance(handler, _Handler):
        signal.signal(signal.SIGINT, signal.default_int_handler)
        if handler.pressed:
            raise KeyboardInterrupt
