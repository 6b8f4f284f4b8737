from __future__ import annotations

import lzma
from pathlib import Path

import pytest

from bench.load import traces
from bench.load.traces import Entry

MOONCAKE = (
    '{"timestamp": 3000, "input_length": 700, "output_length": 4, "hash_ids": [0, 2]}\n'
    '{"timestamp": 1000, "input_length": 600, "output_length": 6, "hash_ids": [0, 1]}\n'
)
AZURE = (
    "TIMESTAMP,ContextTokens,GeneratedTokens\r\n"
    "2023-11-16 18:15:46.6805900,374,44\r\n"
    "2023-11-16 18:15:50.9306900,396,109\r\n"
)


def test_mooncake_is_sorted_and_starts_at_zero(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text(MOONCAKE)
    assert traces.load(path) == [Entry(0.0, 600, 6, (0, 1)), Entry(2.0, 700, 4, (0, 2))]


def test_a_compressed_trace_gives_the_same_entries(tmp_path: Path) -> None:
    path = tmp_path / "trace.jsonl.xz"
    path.write_bytes(lzma.compress(MOONCAKE.encode()))
    assert traces.load(path, limit=1) == [Entry(0.0, 600, 6, (0, 1))]


def test_azure_has_seven_decimals_of_a_second_and_no_pages(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text(AZURE, newline="")
    first, second = traces.load(path)
    assert first == Entry(0.0, 374, 44)
    assert second.at == pytest.approx(4.2501)
    assert (second.prompt, second.out, second.pages) == (396, 109, ())


@pytest.mark.parametrize("content", ["when,what\n1,2\n", '{"timestamp": "soon"}\n', "", "{broken\n"])
def test_the_error_of_another_format_names_the_file(tmp_path: Path, content: str) -> None:
    path = tmp_path / "odd.csv"
    path.write_text(content)
    with pytest.raises(ValueError, match=r"odd\.csv"):
        traces.load(path)
