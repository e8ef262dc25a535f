"""Observers, to which a thread hands its launches of kernels or its calls of operators instead of making them."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


class Observation(threading.local):
    """The observer of one sort of event, each thread's own; None where nobody observes."""

    observer: Any = None

    @contextmanager
    def by(self, observer: Any) -> Iterator[None]:
        """Hand this thread's events to ``observer``."""
        before, self.observer = self.observer, observer
        try:
            yield
        finally:
            self.observer = before
