"""Interceptors of operators' calls."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar


class Interceptors(threading.local):
    """The interceptor of calls that each thread has for itself, or None; it is handed these calls in place of kernels.

    Attributes:
        active: the number of active interceptors in all threads; if 0, nothing needs to look for this thread's.
    """

    interceptor: Any = None
    active: ClassVar[int] = 0
    _counting: ClassVar[Any] = threading.Lock()

    @contextmanager
    def by(self, interceptor: Any) -> Iterator[None]:
        """Hand this thread's calls to ``interceptor``."""
        before, self.interceptor = self.interceptor, interceptor
        with self._counting:
            Interceptors.active += 1
        try:
            yield
        finally:
            self.interceptor = before
            with self._counting:
                Interceptors.active -= 1
