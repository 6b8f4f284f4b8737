"""Servers of benches end with them."""

from __future__ import annotations

import os
import select
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from bench import servers
from tests.rigs.tree import ROOT

BENCH = """
import sys, pathlib, bench.servers
server = bench.servers.start("http.server", ["0", "--bind", "127.0.0.1"], pathlib.Path(sys.argv[1]))
print(server.pid, flush=True)
input()
"""


def test_a_server_ends_with_a_bench_that_is_killed(tmp_path: Path) -> None:
    command = [sys.executable, "-c", BENCH, str(tmp_path / "log")]
    with subprocess.Popen(command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as bench:
        assert bench.stdout is not None
        server = os.pidfd_open(int(bench.stdout.readline()))
        bench.terminate()
    try:
        assert select.select([server], [], [], 30)[0], "the server still runs"
    finally:
        os.close(server)


def test_no_client_is_given_the_port_of_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives ports from 32,768 on to clients, and could before the server listens."""
    monkeypatch.setattr(servers, "start", lambda *given: None)
    ports = [urlsplit(servers.Server([], tmp_path / "log").url).port for _ in range(20)]
    assert all(port is not None and port < 32_768 for port in ports)
