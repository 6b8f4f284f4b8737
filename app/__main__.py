"""`python -m app`: see `app.cli`."""

import sys

OWN = ("app", "core", "gpu")
"""Our own packages: a module missing there is a bug, not a package to install."""

if __name__ == "__main__":
    try:
        from app.cli import main

        main()
    except ModuleNotFoundError as missing:
        package = (missing.name or "").partition(".")[0]
        if not package or package in OWN:
            raise
        print(
            f"loom: error: the Python package {package!r} is not installed; run 'pip install -e .' in the "
            "directory of pyproject.toml",
            file=sys.stderr,
        )
        raise SystemExit(2) from None
