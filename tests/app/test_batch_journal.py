"""Batch journal: requests in an output file are done, whatever happened while it was written."""

from __future__ import annotations

import codecs
import json
import resource
from pathlib import Path

import pytest

from app.batch import lines
from app.batch.journal import Journal, Tally, drop_failed, is_journal, lock
from app.batch.lines import answered, check_input, failed, read_lines, unanswered
from app.commands.generate import for_model, run
from app.settings import GenerateFlags
from core.config import Config
from core.errors import ConfigError, ContextExceeded, Overloaded, RequestError

BODY = {
    "usage": {
        "prompt_tokens": 5,
        "completion_tokens": 3,
        "prompt_tokens_details": {"cached_tokens": 4},
        "completion_tokens_details": None,
    }
}


def write(path: Path, *records: bytes) -> Tally:
    tally = Tally()
    journal = Journal(path, tally)
    for record in records:
        journal.append(record)
    journal.close()
    journal.close()
    return tally


def test_a_journal_remembers(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert write(path, answered("a", 200, BODY), failed("b", RequestError("no", "x"))).ids == set()
    tally = write(path, unanswered("c", "batch_expired", "late"))
    assert (tally.ids, tally.completed, tally.failed) == ({"a", "b"}, 1, 1)
    shown = tally.usage.shown()
    assert (shown["input_tokens"], shown["output_tokens"], shown["total_tokens"]) == (5, 3, 8)
    assert shown["input_tokens_details"] == {"cached_tokens": 4}
    again = Tally()
    Journal(path, again).close()
    assert (again.ids, again.failed) == ({"a", "b", "c"}, 2)


def test_a_journal_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "out"
    journal = Journal(path, Tally())
    journal.append(failed("a", RequestError("no")))
    for write in (lambda: Journal(path, Tally()), lambda: drop_failed(path)):
        with pytest.raises(OSError, match="another process writes to it"):
            write()
    journal.close()
    assert drop_failed(path) == 1


def test_a_journal_that_was_replaced_is_not_written(tmp_path: Path) -> None:
    path, new = tmp_path / "out", tmp_path / "new"
    for each in (path, new):
        each.write_bytes(b"")
    with path.open("rb") as old:
        new.replace(path)
        with pytest.raises(BlockingIOError, match="another process writes to it"):
            lock(old, path)


@pytest.mark.parametrize(
    ("text", "ours"),
    [
        (b"", True),
        (b'{"id":"ba', True),
        pytest.param(answered("a", 200, {}), True, id="an answer"),  # with random digits
        (b"my notes", False),
        (b"{}\n", False),
        (b'{"custom_id": "a", "url": "/v1/completions", "body": {}}\n', False),
        (b'{"custom_id": "a", "response": {"status_code": 200}, "error": null}\n', True),
    ],
)
def test_a_journal_is_known_by_its_beginning(tmp_path: Path, text: bytes, ours: bool) -> None:
    (tmp_path / "out").write_bytes(text)
    assert is_journal(tmp_path / "out") is ours


@pytest.mark.parametrize("keep", [1, 10, -1])
def test_a_torn_last_line_is_cut_and_done_again(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "out"
    write(path, answered("a", 200, {}))
    whole = path.read_bytes()
    torn = answered("b", 200, {"text": "Ω" * 50})
    path.write_bytes(whole + torn[:keep])
    assert write(path, answered("c", 200, {})).ids == {"a"}
    assert [json.loads(line)["custom_id"] for line in path.read_text().splitlines()] == ["a", "c"]


def test_strange_lines_in_between_cost_nothing(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"\x00\x00\n[]\n\n" + answered("a", 200, {"usage": 7}) + answered("b", 200, {}))
    assert write(path).ids == {"b"}


def test_records_have_the_shape_of_openai(tmp_path: Path) -> None:
    good = json.loads(answered("a", 200, {"k": 1}))
    assert set(good) == {"id", "custom_id", "response", "error"}
    assert good["response"]["body"] == {"k": 1} and good["error"] is None
    bad = json.loads(failed("a", ContextExceeded(10, 20, 0)))
    assert bad["response"]["status_code"] == 400
    assert bad["response"]["body"]["error"]["code"] == "context_length_exceeded"
    assert json.loads(failed("a", Overloaded("full")))["response"]["status_code"] == 429
    bug = json.loads(failed("a", KeyError("secret")))
    assert bug["response"]["status_code"] == 500 and "secret" not in json.dumps(bug)
    never = json.loads(unanswered("a", "code", "why"))
    assert never["response"] is None and never["error"] == {"code": "code", "message": "why"}


def test_a_record_is_one_line_to_everybody() -> None:
    text = "a\u2028b\u2029c\u0085d\x0be\x0cf\x1cg\rh\ni"
    record = answered(text, 200, {"text": text}).decode()
    assert len(record.splitlines()) == 1
    assert json.loads(record)["custom_id"] == json.loads(record)["response"]["body"]["text"] == text


def test_lines_have_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINE", 100)
    path = tmp_path / "in"
    path.write_bytes(b"a" * 1000 + b"\n\n" + b"b" * 100 + b"\n" + b"c" * 150)
    assert [(number, len(text)) for number, text in read_lines(path)] == [(1, 101), (3, 101), (4, 101)]
    total, errors = check_input(path, "/v1/completions")
    assert total == 0
    assert (errors[0].code, errors[0].line) == ("line_too_long", 1)


def test_a_file_of_windows(tmp_path: Path) -> None:
    """A mark of UTF-8 in front, and its line ends."""
    path = tmp_path / "in"
    text = '{"custom_id": "a", "url": "/v1/completions", "body": {}}\r\n\r\n'
    path.write_bytes(codecs.BOM_UTF8 + text.encode())
    assert check_input(path, "/v1/completions") == (1, [])
    assert list(read_lines(path)) == [(1, text.encode()[:-2])]


def test_a_batch_has_a_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "MAX_LINES", 3)
    path = tmp_path / "in"
    text = '{{"custom_id": "{}", "url": "/v1/completions", "body": {{}}}}\n'
    path.write_text("".join(text.format(i) for i in range(3)))
    assert check_input(path, "/v1/completions") == (3, [])
    path.write_text("".join(text.format(i) for i in range(4)))
    assert check_input(path, "/v1/completions")[1][0].code == "too_many_lines"


def test_failed_records_leave_the_journal_and_answers_stay(tmp_path: Path) -> None:
    path = tmp_path / "out"
    assert drop_failed(path) == 0 and not path.exists()
    bad, refused = unanswered("b", "invalid_line", "No."), failed("c", RequestError("No."))
    good = [answered("a", 200, {}), answered("d", 200, {"usage": None})]
    path.write_bytes(good[0] + bad + refused + good[1] + b"torn")
    assert drop_failed(path) == 2
    assert path.read_bytes() == good[0] + good[1] + b"torn"
    assert drop_failed(path) == 0 and path.read_bytes() == good[0] + good[1] + b"torn"
    assert [file.name for file in tmp_path.iterdir()] == ["out"]


def test_a_disk_without_room_keeps_the_journal_alone(tmp_path: Path) -> None:
    path, source = tmp_path / "out", tmp_path / "in"
    records = answered("a", 200, {}) + failed("b", RequestError("No."))
    path.write_bytes(records)
    source.touch()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, limits[1]))
    try:
        with pytest.raises(ConfigError, match=f"cannot use {path}: File too large"):
            run(Config(), GenerateFlags(input=str(source), output=str(path)))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert path.read_bytes() == records
    assert sorted(file.name for file in tmp_path.iterdir()) == ["in", "out"]


@pytest.mark.parametrize(
    ("name", "kept"),
    [("any", False), ("gpt-4o", False), ("other", True)],
)
def test_a_name_that_may_be_given_for_the_model(name: str, kept: bool) -> None:
    body = b'{"model": "gpt-4o", "prompt": [1e999, "\\ud83d\\ude00"]}'
    made = for_model(body, name)
    assert (b'"gpt-4o"' in made) is kept
    assert b'[1e999, "\\ud83d\\ude00"]' in made  # the rest stays as it was written
    assert for_model(b"{oops", name) == b"{oops"


def test_a_line_without_room_is_not_half_there(tmp_path: Path) -> None:
    path, tally = tmp_path / "out", Tally()
    journal = Journal(path, tally)
    journal.append(b'{"custom_id": "a"}\n')
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (25, hard))
    try:
        with pytest.raises(OSError):
            journal.append(b'{"custom_id": "b"}\n')
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    journal.append(b'{"custom_id": "c"}\n')
    journal.close()
    assert path.read_bytes() == b'{"custom_id": "a"}\n{"custom_id": "c"}\n'
