"""`python -m bench.load`."""

from __future__ import annotations

import sys

from bench.load.main import main

if __name__ == "__main__":
    sys.exit(main())
