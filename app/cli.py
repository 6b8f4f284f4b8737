"""Settings from the command line. Flags are made from the fields of the config groups.

Importing this must stay quick: `--help` and a mistyped flag should not wait for torch.
"""

from __future__ import annotations

import argparse
import gc
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import MappingProxyType
from typing import Annotated, Any, Literal, NoReturn, TypeVar, get_args, get_origin, get_type_hints

import msgspec
from msgspec import Meta
from msgspec.structs import FieldInfo, fields

from app.aliases import translate
from core.adapters import adapters_at_start
from core.config import (
    LEAST_STEP,
    PARSERS,
    CacheConfig,
    Config,
    LoraConfig,
    ModelConfig,
    ParallelConfig,
    ScheduleConfig,
    ServeConfig,
    SpeculativeConfig,
    check_speculation,
)
from core.env import prepare_cpu_threads
from core.errors import ConfigError
from core.nodes import check_nodes, of_torchrun

T = TypeVar("T", bound=msgspec.Struct)
Groups = tuple[tuple[str, type[msgspec.Struct]], ...]

ENGINE_GROUPS: Groups = (
    ("model", ModelConfig),
    ("cache", CacheConfig),
    ("schedule", ScheduleConfig),
    ("speculative", SpeculativeConfig),
    ("lora", LoraConfig),
    ("parallel", ParallelConfig),
)
GROUPS: Groups = (*ENGINE_GROUPS, ("serve", ServeConfig))

BAD_USAGE = 2
"""Exit code for errors that the operator can fix: argparse's own, and ours for `ConfigError`."""
INTERRUPTED = 130

PROBE = 1 << 16
"""Bytes written to the temporary folder at the start, as a test."""

ALIASES = "Common flags of SGLang (--model-path, ...) and vLLM (serve MODEL, --max-model-len, ...) work too."


class GenerateFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `generate` that are not the model's."""

    input: Annotated[str, "JSONL file with one request a line"]
    output: Annotated[str, "JSONL file that results are appended to"]
    concurrency: Annotated[int, "requests at once; 0: chosen by device", Meta(ge=0)] = 0
    model_name: Annotated[str, "name that lines may give for the model besides its own; any: every name"] = ""


def main(argv: Sequence[str] | None = None) -> None:
    """Serve until stopped, or `generate` a file. Exits with 0 on success, 1 when the engine or a line failed,
    2 for a wrong configuration."""
    flags = sys.argv[1:] if argv is None else argv
    try:
        code = _generate(flags[1:]) if flags[:1] == ["generate"] else _serve(flags)
    except KeyboardInterrupt:  # before the server handles signals itself
        code = INTERRUPTED
    except ConfigError as error:
        print(f"loom: error: {error}", file=sys.stderr)
        code = BAD_USAGE
    raise SystemExit(code)


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


def parse(argv: Sequence[str]) -> Config:
    """Settings from command line arguments. Exits with 2 and a one-line message for a wrong flag."""
    parser = make_parser()
    return _settings(parser, parser.read(argv))


def parse_generate(argv: Sequence[str]) -> tuple[Config, GenerateFlags]:
    """The same for the arguments after `generate`."""
    parser = make_generate_parser()
    given = parser.read(argv)
    return _settings(parser, given), _filled(parser, given, GenerateFlags)


def _settings(parser: Parser, given: Mapping[str, Any]) -> Config:
    config = msgspec.convert({name: _filled(parser, given, group) for name, group in GROUPS}, Config)
    try:
        config = msgspec.structs.replace(config, parallel=of_torchrun(config.parallel))
        check_nodes(config.parallel)
        check_speculation(config.speculative)
        adapters_at_start(config.lora)
    except ConfigError as error:
        parser.error(str(error))
    if config.cache.page_size & (config.cache.page_size - 1):
        parser.error(f"argument --page-size: must be a power of two, got {config.cache.page_size}")
    if 0 < (tokens := config.schedule.step_tokens) < LEAST_STEP:
        parser.error(f"argument --step-tokens: must be 0 or at least {LEAST_STEP}, got {tokens}")
    return config


def _filled(parser: Parser, given: Mapping[str, Any], group: type[T]) -> T:
    """A group with the values that were given."""
    names = (field.encode_name for field in fields(group))
    own = {name: given[name] for name in names if given.get(name) is not None}
    try:
        return msgspec.convert(own, group)
    except msgspec.ValidationError as error:
        field = str(error).rpartition("$.")[2].rstrip("`")
        parser.error(f"argument {_flag(field)}: {str(error).partition(' - at')[0]}, got {own.get(field)}")


class Parser(argparse.ArgumentParser):
    """Reports a wrong flag in one line instead of a page of usage."""

    _renamed: Mapping[str, str] = MappingProxyType({})

    def read(self, argv: Sequence[str]) -> dict[str, Any]:
        """The given values by field; flags of SGLang and vLLM are translated (`app/aliases.py`)."""
        try:
            done = translate(argv)
        except ConfigError as error:
            self.error(str(error))
        self._renamed = done.renamed
        given = vars(self.parse_args(done.flags))
        for notice in done.notices:
            print(f"loom: note: {notice}", file=sys.stderr)
        return given

    def error(self, message: str) -> NoReturn:
        for ours, theirs in self._renamed.items():  # name the flag as it was written
            message = message.replace(f"argument {ours}:", f"argument {theirs}:")
        self.exit(BAD_USAGE, f"loom: error: {message} (see {self.prog} --help)\n")


def make_parser() -> Parser:
    """One flag per field, and `--no-flag` for those that are on by default."""
    parser = Parser(
        prog="python -m app",
        description="Serve a language model over an OpenAI-compatible HTTP API.",
        epilog=ALIASES,
        allow_abbrev=False,
    )
    for name, group in GROUPS:
        _add_fields(parser.add_argument_group(name), group)
    return parser


def make_generate_parser() -> Parser:
    """Flags of `generate`."""
    parser = Parser(
        prog="python -m app generate",
        description="Answer every line of a JSONL file: OpenAI batch lines, or objects with a prompt or "
        "messages. Started again with the same output it does what is left or has failed.",
        allow_abbrev=False,
    )
    _add_fields(parser, GenerateFlags)
    for name, group in ENGINE_GROUPS:
        _add_fields(parser.add_argument_group(name), group)
    _add_fields(parser.add_argument_group("parsers"), ServeConfig, PARSERS)
    return parser


def _add_fields(section: Any, group: type[msgspec.Struct], names: Sequence[str] = ()) -> None:
    """A flag for each of the named fields, or for all."""
    hints = get_type_hints(group, include_extras=True)
    for field in fields(group):
        if not names or field.name in names:
            _add_flag(section, field, hints[field.name])


def _add_flag(section: Any, field: FieldInfo, hint: Any) -> None:
    kind, text, *_ = get_args(hint)
    if several := get_origin(kind) is tuple:
        kind = get_args(kind)[0]
    text, default = text.replace("%", "%%"), field.default
    if default not in ("", False, (), msgspec.NODEFAULT):
        text = f"{text} (default: {default})"
    how: dict[str, Any]
    if kind is bool:
        how = {"action": argparse.BooleanOptionalAction, "default": None}
    elif get_origin(kind) is Literal:
        how = {"choices": get_args(kind)}
    else:
        how = {"type": kind, "metavar": kind.__name__.upper(), "required": field.required}
    if several:
        how |= {"nargs": "+", "action": "extend"}
    section.add_argument(_flag(field.encode_name), dest=field.encode_name, help=text, **how)


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
