"""Starts a server, runs the six scenarios against it, stops it.

    python -m bench.table --model configs/models/qwen3-30b-a3b --name h200-qwen3-30b-a3b \\
        --note "what changed, and its predicted effect" [--scenario c32] [flags of the server]

Runs `python -m app` with random weights on a free port. Writes bench/results/NAME.json, and a dated copy with
the note under bench/results/history/. Time from start to ready and to the first token is measured too.

Bias: client and server share the host's cores; the peers' figures were taken the same way.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.load.main import main as load
from bench.results import RESULTS, conditions

SERVER = ("--device", "cuda", "--load-format", "dummy", "--context-length", "16384", "--max-running", "512")
"""Flags as the peers were started: random weights, context length 16,384, at most 512 running requests."""


def free_port() -> int:
    """A port that is not in use."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)


def _end_with_parent() -> None:
    """End this process, which holds a GPU, with its parent: killed by `timeout`, a bench runs no
    `finally`."""
    if sys.platform == "linux":
        _LIBC.prctl(_PDEATHSIG, signal.SIGKILL)


def start(module: str, arguments: Sequence[str], log: Path) -> subprocess.Popen[bytes]:
    """`python -m module` as a process that writes to `log`. It is killed when the calling thread ends: call
    it in the main one."""
    with log.open("wb") as output:
        return subprocess.Popen(
            [sys.executable, "-m", module, *arguments],
            stdout=output,
            stderr=subprocess.STDOUT,
            preexec_fn=_end_with_parent,
        )


class Server:
    """`python -m app` as a process, or another `module` that takes its flags."""

    def __init__(self, flags: list[str], log: Path, module: str = "app") -> None:
        self.url = f"http://127.0.0.1:{(port := free_port())}"
        self._begun = time.perf_counter()
        self._log = log
        self._process = start(module, ["--port", str(port), *flags], log)

    def wait_ready(self, timeout: float) -> float:
        """Seconds from start until `/health` is ok. Raises `RuntimeError` if the server ends before."""
        while time.perf_counter() - self._begun < timeout:
            if self._process.poll() is not None:
                raise RuntimeError(f"the server ended with {self._process.returncode}: see {self._log}")
            try:
                with urllib.request.urlopen(self.url + "/health", timeout=5) as answer:
                    if answer.status == 200:
                        return self.age()
            except (urllib.error.URLError, OSError):
                pass  # not listening yet, or starting
            time.sleep(0.05)
        raise RuntimeError(f"not ready after {timeout:.0f} s: see {self._log}")

    def first_token(self) -> float:
        """Seconds from start to the first token of a request."""
        body = json.dumps({"prompt": [1000] * 8, "max_tokens": 1}).encode()
        request = urllib.request.Request(
            self.url + "/v1/completions", body, {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as answer:
            answer.read()
        return self.age()

    def age(self) -> float:
        """Seconds since the process was started."""
        return time.perf_counter() - self._begun

    def stop(self) -> None:
        """Terminate the server, kill it after 30 s."""
        self._process.terminate()
        try:
            self._process.wait(30)
        except subprocess.TimeoutExpired:
            self._process.kill()


def main() -> None:
    """Measure and write the results."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--name", required=True, help="of the file under bench/results")
    parser.add_argument("--note", default="", help="what changed, and its predicted effect")
    parser.add_argument("--scenario", default="table,chat256", help="as for bench.load")
    parser.add_argument("--scale", default="1", help="as for bench.load: 2 for two replicas")
    parser.add_argument("--requests", help="as for bench.load: instead of the scenario's, before --scale")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds to wait until the server is ready"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    args, flags = parser.parse_known_args()
    history = args.out / "history"
    history.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    raw = history / f"{args.name}-{stamp}.json"
    server = Server(["--model", args.model, *SERVER, *flags], raw.with_suffix(".log"))
    try:
        ready, first = server.wait_ready(args.timeout), server.first_token()
        print(f"ready after {ready:.1f} s, first token after {first:.1f} s", flush=True)
        run = ["--url", server.url, "--scenario", args.scenario, "--scale", args.scale]
        more = ["--requests", args.requests] if args.requests else []
        status = load([*run, *more, "--output", str(raw)])
    finally:
        server.stop()
    if status:
        sys.exit(status)
    results: list[dict[str, Any]] = json.loads(raw.read_text())
    about = {
        "note": args.note,
        "server_flags": flags,
        "start_to_ready_s": round(ready, 2),
        "start_to_first_token_s": round(first, 2),
        **conditions(),
    }
    for result in results:
        result["conditions"] = result.get("conditions", {}) | about
    text = json.dumps(results, indent=1) + "\n"
    raw.write_text(text)
    (args.out / f"{args.name}.json").write_text(text)


if __name__ == "__main__":
    main()
