"""Every row of `bench.chaos` at a small scale: its claim holds, and its injected fault is detected."""

from __future__ import annotations

import json
import re
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from bench.chaos.faults import FAULTS
from bench.chaos.main import ENDED, main
from bench.chaos.rows import TABLE

NAMES = [row.name for row in TABLE]


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """One thread for the servers, as the rows have them; and this process keeps its own limit of files."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def chaos(out: Path, *arguments: str) -> dict[str, dict[str, Any]]:
    """Run the suite; its results by row."""
    with pytest.raises(SystemExit):
        main(["--scale", "0.01", "--soak", "1", "--out", str(out), *arguments])
    return {each["row"]: each for each in json.loads(out.read_text())}


def test_every_row_holds(tmp_path: Path) -> None:
    results = chaos(tmp_path / "out.json")
    assert sorted(results) == sorted(NAMES)
    assert {name: each["wrong"] for name, each in results.items() if not each["pass"]} == {}
    assert all({"row", "claim", "figure", "pass", "conditions"} <= set(each) for each in results.values())


def test_every_row_detects_its_fault(tmp_path: Path) -> None:
    results = chaos(tmp_path / "out.json", "--break")
    assert sorted(results) == sorted(NAMES)
    assert [name for name, each in results.items() if each["pass"]] == []
    # Detected by a check of the row, not by an exception that ended it.
    assert {name: each["wrong"] for name, each in results.items() if each["wrong"][0].startswith(ENDED)} == {}


def test_every_row_has_its_own_fault() -> None:
    faults = [row.fault for row in TABLE]
    assert set(faults) <= set(FAULTS)
    assert len(set(faults)) == len(faults)


def test_a_row_that_does_not_exist_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["--only", "nothing"])
    assert ended.value.code == 2
    assert re.search("no row 'nothing'", capsys.readouterr().err)
