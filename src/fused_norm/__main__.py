"""``python -m fused_norm`` is ``fused-norm``."""

import sys

from .cli import main

if __name__ == "__main__":
    sys.exit(main())
