"""`--api-keys-file`: what a table may say, how an error reads, and reading the file again."""

from __future__ import annotations

import hashlib
import logging
from pathlib import Path

import pytest

from app.http.key_file import Terms, digest, read
from app.http.tenant import Keys
from app.server import reload_keys
from app.settings import parse
from core.errors import ConfigError
from tests.rigs.usage import usage_error

SHA = hashlib.sha256(b"secret").hexdigest()


def test_a_mark_in_front_as_of_editors_on_windows(file: Path) -> None:
    file.write_text(f'\ufeff[keys.alice]\r\nsha256 = "{SHA}"\r\n', encoding="utf-8", newline="")
    (terms,) = read(str(file))
    assert terms.tenant == SHA


@pytest.fixture
def file(tmp_path: Path) -> Path:
    made = tmp_path / "keys.toml"
    made.touch(mode=0o600)
    return made


def test_a_table_with_everything(file: Path) -> None:
    file.write_text(f"""
        [keys.alice]
        sha256 = "{SHA.upper()}"
        concurrency = 8
        tokens_per_minute = 200000
        requests_per_minute = 600
        priority = -3
        models = ["base", "sql"]
        cache_salt = "team"
        admin = true
        [keys.bob]
        key = "secret of bob"
    """)
    alice, bob = read(str(file))
    assert alice == Terms(
        name="alice",
        tenant=SHA,
        concurrency=8,
        tokens_per_minute=200_000,
        requests_per_minute=600,
        priority=-3,
        models=("base", "sql"),
        cache_salt="team",
        admin=True,
    )
    assert bob == Terms(name="bob", tenant=digest("secret of bob"))
    assert (bob.concurrency, bob.priority, bob.models, bob.admin) == (0, 0, None, False)


ONE = '[keys.alice]\nkey = "k-secret"\n'
WRONG = {
    "": "defines no key. Add a table",
    "[keys]": "defines no key. Add a table",
    "[key.alice]": "unknown table 'key'. Did you mean 'keys'?",
    "keys = 3": "defines no key",
    "[keys]\nalice = 'k-secret'": "keys.alice must be a table. Write it as [keys.alice]",
    "[keys.'a b']": "'a b' is no name for a key: take 1 to 64 letters",
    "[keys.alice": "is not a TOML file: ",
    "[keys.alice]": "[keys.alice] has no key. Add 'key' or 'sha256'",
    f"{ONE}sha256 = '{SHA}'": "[keys.alice] has 'key' and 'sha256'. Remove one",
    "[keys.alice]\nkey = ''": "[keys.alice] key: must be a text that is not empty",
    "[keys.alice]\nkey = ' k-secret'": "without blanks around it",
    "[keys.alice]\nkey = 5": "[keys.alice] key: must be a text",
    "[keys.alice]\nsha256 = 'k-secret'": "[keys.alice] sha256: must be the 64 hex digits",
    f"[keys.alice]\nsha256 = '{digest('')}'": "[keys.alice] sha256: is the digest of an empty text",
    f"{ONE}concurency = 1": "[keys.alice] has an unknown field 'concurency'. Did you mean 'concurrency'?",
    f"{ONE}zzz = 1": "[keys.alice] has an unknown field 'zzz'. Known: key, sha256, concurrency,",
    f"{ONE}concurrency = -1": "concurrency: expected int >= 0, got -1. Correct it, or leave it out.",
    f"{ONE}concurrency = 'x'": "[keys.alice] concurrency: expected int, got str.",
    f"{ONE}tokens_per_minute = 0": "[keys.alice] tokens_per_minute: expected int >= 1, got 0.",
    f"{ONE}requests_per_minute = 1.5": "[keys.alice] requests_per_minute: expected int, got float.",
    f"{ONE}priority = 2147483648": "[keys.alice] priority: expected int <= 2147483647, got 2147483648.",
    f"{ONE}models = 'base'": "[keys.alice] models: expected array, got str.",
    f"{ONE}models = [1]": "[keys.alice] models: expected str, got int.",
    f"{ONE}cache_salt = ''": "[keys.alice] cache_salt: expected str of length >= 1.",
    f"{ONE}admin = 1": "[keys.alice] admin: expected bool, got int. Correct it.",
    f"{ONE}[keys.bob]\nkey = 'k-secret'": "[keys.bob] has the same key as [keys.alice]. Remove one",
    f"{ONE}[keys.bob]\nkey = 'other'": "[keys.bob] has the same key as --api-key. Remove one",
}


@pytest.mark.parametrize("text", WRONG, ids=[text[:60] for text in WRONG])
def test_an_error_names_table_field_limit_and_remedy(text: str, file: Path) -> None:
    file.write_text(text)
    with pytest.raises(ConfigError) as error:
        read(str(file), ["other"])
    told = str(error.value)
    assert WRONG[text] in told and str(file) in told
    assert "k-secret" not in told and "\n" not in told


def test_a_wrong_file_ends_the_start_as_a_wrong_argument_does(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file.write_text(f"{ONE}concurency = 1")
    for path, told in ((file, "unknown field 'concurency'"), (file / "x", "cannot read --api-keys-file")):
        assert told in usage_error(capsys, parse, ["--api-keys-file", str(path)])
    file.write_text(ONE)
    with pytest.raises(SystemExit):
        parse(["--api-keys-file", str(file), "--api-key", "k-secret"])
    assert parse(["--api-keys-file", str(file)]).serve.keyed


def test_it_is_a_variable_and_an_entry_of_a_file_of_flags(
    file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file.write_text(ONE)
    flags = tmp_path / "flags.toml"
    flags.write_text(f"api-keys-file = '{file}'")
    assert parse(["--config", str(flags)]).serve.api_keys_file == str(file)
    monkeypatch.setenv("LOOM_API_KEYS_FILE", str(file))
    assert parse([]).serve.api_keys_file == str(file)


@pytest.mark.parametrize(("mode", "warned"), [(0o600, False), (0o640, False), (0o604, True), (0o602, True)])
def test_a_file_that_others_can_read_is_warned_of(
    mode: int, warned: bool, file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    file.write_text(ONE)
    file.chmod(mode)
    Keys([], str(file))
    assert ("other users may read or change it" in caplog.text) is warned


def test_reading_it_again(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    file.write_text(ONE + '[keys.bob]\nkey = "b-secret"\n[keys.carol]\nkey = "c-secret"\n')
    keys = Keys(["given"], str(file))
    alice = keys.find("k-secret")
    assert alice is not None
    alice.admit()

    file.write_text(ONE + "concurrency = 2\n" + '[keys.dave]\nkey = "d-secret"\n[keys.carol]\nkey = "new"\n')
    reload_keys(keys)
    assert caplog.messages == [
        "API keys: removed bob; changed alice (concurrency); added dave; changed carol (key)"
    ]
    assert keys.find("k-secret") is alice and (alice.running, alice.terms.concurrency) == (1, 2)
    assert keys.find("b-secret") is None and keys.find("c-secret") is None
    assert not keys.owner(digest("b-secret")).terms.allows("base"), "its batches end"
    assert Keys(["given"]).owner(digest("before")).terms.allows("base"), "as ever without a file"
    names = [account.terms.name for account in map(keys.find, ("given", "d-secret", "new")) if account]
    assert names == ["", "dave", "carol"]

    for broken in ("", "[keys.alice]", None):
        caplog.clear()
        if broken is None:
            file.unlink()
        else:
            file.write_text(broken)
        reload_keys(keys)
        assert [record.levelname for record in caplog.records] == ["ERROR"]
        assert "the API keys stay as they were: " in caplog.text and "secret" not in caplog.text
        assert keys.find("k-secret") is alice and keys.find("new") is not None
