"""Claims of `SECURITY.md` about the server process."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

import aiohttp

from tests.rigs.process import Process

TCP_LISTEN = "0A"


def listening(pid: int) -> list[int]:
    """Ports on which a process and its children listen, on any address."""
    sockets: set[str] = set()
    for child in (pid, *children(pid)):
        for link in Path(f"/proc/{child}/fd").iterdir():
            with suppress(FileNotFoundError):  # it was closed meanwhile
                target = str(link.readlink())
                if target.startswith("socket:["):
                    sockets.add(target[8:-1])
    ports = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/{pid}/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == TCP_LISTEN and words[9] in sockets:
                ports.append(int(words[1].rpartition(":")[2], 16))
    return ports


def children(pid: int) -> list[int]:
    tasks = Path(f"/proc/{pid}/task").iterdir()
    found: list[int] = []
    for task in tasks:
        with suppress(FileNotFoundError, ProcessLookupError):  # its thread has ended meanwhile
            found += map(int, (task / "children").read_text().split())
    return found


async def test_one_port_listens(shared: Process) -> None:
    async with aiohttp.ClientSession() as session:
        await shared.ready(session)
        # A constraint starts the helper process, which must not listen either.
        body = {"prompt": "a", "max_tokens": 4, "regex": "[a-z]{0,400}(b|c){2,300}"}
        async with session.post(f"{shared.url}/v1/completions", json=body) as answer:
            assert answer.status in (200, 400)
    assert listening(shared.process.pid) == [shared.port]
