"""``python -m benchmarks``, from a checkout."""

import sys

from .command import main

if __name__ == "__main__":  # Not in the processes that it spawns.
    sys.exit(main())
