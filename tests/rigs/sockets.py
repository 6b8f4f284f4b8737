"""The sockets that a process listens on, as Linux shows them."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path

LOCALHOST = "0100007F"
"""127.0.0.1 in /proc."""


def listening(process: int) -> list[str]:
    """Addresses of the TCP sockets that a process listens on, in the kernel's hexadecimal."""
    own = set()
    for each in os.scandir(f"/proc/{process}/fd"):
        with suppress(FileNotFoundError):  # it was closed meanwhile
            own.add(os.readlink(each.path))
    tables = [Path(f"/proc/{process}/net/{name}").read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    rows = [line.split() for table in tables for line in table]
    listen = [row for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in own]
    return [row[1].partition(":")[0] for row in listen]
