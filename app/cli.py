"""`loom COMMAND`, also `python -m app COMMAND`: which command runs, and how it ends.

Importing this must stay quick: `--help` and a mistyped flag should not wait for torch.
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from app import logs
from app.commands import check_config, models
from app.flags import BAD_USAGE, did_you_mean
from app.process import INTERRUPTED, check_temporary_folder, invocation, leave, open_standard_files
from app.settings import make_parser, parse, parse_chat, parse_generate, parse_with
from core.config import Config
from core.env import prepare_cpu_threads
from core.errors import ConfigError


def main(argv: Sequence[str] | None = None) -> None:
    """Run a command: `serve` where none is named. Exits with 0 on success, 1 when the engine or a line
    failed, 2 for a wrong configuration."""
    open_standard_files()
    words = sys.argv[1:] if argv is None else argv
    try:
        code = _run(words)
    except KeyboardInterrupt:  # before the server handles signals itself
        code = INTERRUPTED
    except BrokenPipeError:  # of `loom models | head`, say, which has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # what is left is flushed at the exit
        code = 0
    except ConfigError as error:
        logs.flush()  # a line still queued would otherwise stand behind the error
        print(f"loom: error: {error}", file=sys.stderr)
        code = BAD_USAGE
    if code == INTERRUPTED:
        leave(code)  # a normal exit waits for the threads that load a model
    raise SystemExit(code)


def _run(words: Sequence[str]) -> int:
    if not words or words[0].startswith("-"):
        return _serve(words)
    run = _RUN.get(words[0])
    if run is None:
        meant = did_you_mean(words[0], _RUN) or f". To serve a model: {invocation('serve')} {words[0]}"
        raise ConfigError(f"there is no command {words[0]!r}{meant} (see {invocation()} --help)")
    return run(words[1:])


def _serve(argv: Sequence[str]) -> int:
    config = parse(argv)
    with _importing(config):
        if config.parallel.node_rank:
            from app.node import run  # deferred: imports torch
        else:
            from app.server import run  # deferred: the same

    return run(config)


def _generate(argv: Sequence[str]) -> int:
    config, flags = parse_generate(argv)
    with _importing(config):
        from app.commands.generate import run  # deferred: the same

    return run(config, flags)


def _chat(argv: Sequence[str]) -> int:
    config, flags = parse_chat(argv)
    with _importing(config):
        from app.commands.chat import run  # deferred: imports aiohttp

    return run(config, flags)


def _pull(argv: Sequence[str]) -> int:
    config, _ = parse_with(make_parser("pull"), argv)
    with _importing(config):
        from app.commands.pull import run  # deferred: imports what converts checkpoints

    return run(config)


def _models(argv: Sequence[str]) -> int:
    make_parser("models").read(argv)
    return models.run()


def _check_config(argv: Sequence[str]) -> int:
    return check_config.run(*parse_with(make_parser("check-config"), argv))


def _doctor(argv: Sequence[str]) -> int:
    config, _ = parse_with(make_parser("doctor"), argv)
    with _importing(config):
        from app.commands.doctor import run  # deferred: imports torch

    return run(config)


@contextmanager
def _importing(config: Config) -> Iterator[None]:
    """Around imports that take long, after what they rely on. What modules make stays: to walk it again and
    again took the garbage collector a fifth of the imports' time."""
    check_temporary_folder()
    prepare_cpu_threads(config.model.threads)
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


_RUN: Mapping[str, Callable[[Sequence[str]], int]] = {
    "serve": _serve,
    "generate": _generate,
    "chat": _chat,
    "pull": _pull,
    "models": _models,
    "check-config": _check_config,
    "doctor": _doctor,
}
