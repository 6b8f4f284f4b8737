"""Valid traffic beside an attack, in a separate process, so that the attack's event loop does not delay it.

    python -m bench.chaos.neighbour PORT [refused]

Streams the same completion again and again until standard input ends, then prints gaps between events and
texts. With `refused` it requests one token instead and prints the latency of 429 answers.
"""

from __future__ import annotations

import json
import select
import socket
import subprocess
import sys
import time
from typing import Any

from bench.chaos.clients import TEXT, request

BODY = {
    "prompt": "The neighbours sing",
    "max_tokens": 60,
    "ignore_eos": True,
    "temperature": 0,
    "stream": True,
    "return_token_ids": True,
}


class Neighbour:
    """Runs during the `with` block; `seen` holds the results afterwards."""

    def __init__(self, port: int, *what: str) -> None:
        self.seen: dict[str, Any] = {}
        self._arguments = (str(port), *what)

    def __enter__(self) -> Neighbour:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "bench.chaos.neighbour", *self._arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
        )
        return self

    def __exit__(self, *error: object) -> None:
        output, _ = self._process.communicate()
        if error[0] is None:
            self.seen = json.loads(output)


def stream(port: int) -> tuple[list[float], str]:
    """Seconds between the events of one stream, and its text, or "broken: " and the end of the answer."""
    gaps: list[float] = []
    received = b""
    with socket.create_connection(("127.0.0.1", port)) as own:
        own.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        own.sendall(request("POST", TEXT, BODY))
        last = 0.0
        while part := own.recv(65536):
            now = time.perf_counter()
            if last:
                gaps.append(now - last)
            last = now
            received += part
    body = received.partition(b"\r\n\r\n")[2]  # the first event may come with the head, or after a comment
    events = [line[6:] for line in body.split(b"\n\n") if line.startswith(b"data: {")]
    choices = [json.loads(event).get("choices") for event in events]
    if not received.endswith(b"data: [DONE]\n\n") or not all(choices):
        return gaps, "broken: " + received[-300:].decode(errors="replace")
    return gaps, "".join(choice[0]["text"] for choice in choices)


def refused(port: int) -> tuple[list[float], str]:
    """Seconds until the answer if its status is 429, and the status."""
    begun = time.perf_counter()
    with socket.create_connection(("127.0.0.1", port)) as own:
        own.sendall(request("POST", TEXT, {**BODY, "stream": False, "max_tokens": 1}))
        answer = b""
        while part := own.recv(65536):
            answer += part
    status = answer.split(b" ", 2)[1].decode() if answer else "none"
    return ([time.perf_counter() - begun] if status == "429" else []), status


def main() -> None:
    """Send requests until standard input ends."""
    ask = refused if sys.argv[2:] == ["refused"] else stream
    port, times, texts, count = int(sys.argv[1]), [0.0], set[str](), 0
    while not (select.select([sys.stdin], [], [], 0)[0] and count):
        try:
            more, text = ask(port)
        except OSError as error:
            more, text = [], f"broken: {error!r}"
        times += more
        texts.add(text)
        count += 1
    times.sort()
    seen = {"count": count, "p99": times[int(len(times) * 0.99)], "most": times[-1], "texts": sorted(texts)}
    print(json.dumps(seen))


if __name__ == "__main__":
    main()
