"""``fused-norm demo``: tiny models trained stock and fused, and both curves drawn."""

from .common import interpret_without_gpu

interpret_without_gpu()

from ..convergence.demo import add_arguments, run  # noqa: E402

__all__ = ["add_arguments", "run"]
