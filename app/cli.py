"""`python -m app COMMAND`: which command runs, and how it ends.

Importing this must stay quick: `--help` and a mistyped flag should not wait for torch.
"""

from __future__ import annotations

import gc
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import msgspec

from app.flags import BAD_USAGE, did_you_mean
from app.settings import parse, parse_generate
from core.env import prepare_cpu_threads
from core.errors import ConfigError

INTERRUPTED = 130

PROBE = 1 << 16
"""Bytes written to the temporary folder at the start, as a test."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command: `serve` where none is named. Exits with 0 on success, 1 when the engine or a line
    failed, 2 for a wrong configuration."""
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _run(words)
    except KeyboardInterrupt:  # before the server handles signals itself
        code = INTERRUPTED
    except ConfigError as error:
        print(f"loom: error: {error}", file=sys.stderr)
        code = BAD_USAGE
    raise SystemExit(code)


def _run(words: Sequence[str]) -> int:
    if not words or words[0].startswith("-"):
        return _serve(words)
    command = COMMANDS.get(words[0])
    if command is None:
        meant = did_you_mean(words[0], COMMANDS)
        raise ConfigError(f"there is no command {words[0]!r}{meant} (see python -m app --help)")
    return command(words[1:])


def check_temporary_folder() -> None:
    """Raise `ConfigError` unless the temporary folder is writable: torch, triton and others use it, some as
    they are imported, and would fail with a traceback."""
    try:
        with tempfile.TemporaryFile(buffering=0) as file:
            file.write(bytes(PROBE))
    except OSError as error:
        raise ConfigError(
            f"the temporary folder cannot be written to: {error.strerror or error}. Free space there, or "
            "set the environment variable TMPDIR to another folder."
        ) from error


def _serve(argv: Sequence[str]) -> int:
    config = parse(argv)
    check_temporary_folder()
    prepare_cpu_threads(config.model.threads)
    with _importing():
        if config.parallel.node_rank:
            from app.node import run  # deferred: imports torch
        else:
            from app.server import run  # deferred: the same

    return run(config)


def _generate(argv: Sequence[str]) -> int:
    config, flags = parse_generate(argv)
    check_temporary_folder()
    prepare_cpu_threads(config.model.threads)
    with _importing():
        from app.generate import run  # deferred: the same

    return run(config, **msgspec.structs.asdict(flags))


@contextmanager
def _importing() -> Iterator[None]:
    """What modules make stays: to walk it again and again took the garbage collector a fifth of the imports'
    time."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


COMMANDS: Mapping[str, Callable[[Sequence[str]], int]] = {"serve": _serve, "generate": _generate}
