"""Observers, to which a thread hands its launches of kernels or its calls of operators instead of making them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

_counting = threading.Lock()


class Observation(threading.local):
    """The observer of one sort of event, which each thread has for itself; None where nobody observes."""

    observer: Any = None
    active: ClassVar[int] = 0
    """The number of observers of any sort in any thread: at 0 nobody needs to look for this thread's."""

    @contextmanager
    def by(self, observer: Any) -> Iterator[None]:
        """Hand this thread's events to ``observer``."""
        before, self.observer = self.observer, observer
        with _counting:
            Observation.active += 1
        try:
            yield
        finally:
            self.observer = before
            with _counting:
                Observation.active -= 1
