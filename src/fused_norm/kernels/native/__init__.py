"""Native replay: what an operator's Python does for some tensors, done again in C++ for all that are like them."""

from .operation import BackwardContext, Operation

__all__ = ["BackwardContext", "Operation"]
