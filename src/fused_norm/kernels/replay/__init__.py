"""Native replay, an optional part: an operator's Python runs once for tensors of a kind, C++ repeats it from then on.

Importing this package registers it with the operators; nothing else knows it. ``switch`` turns it off and on again.
"""

from .executor import state, switch

__all__ = ["state", "switch"]

switch(True)
