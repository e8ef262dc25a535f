"""``python -m tools.mutants``, from a checkout."""

import sys

from .command import main

if __name__ == "__main__":
    sys.exit(main())
