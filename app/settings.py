"""From a command line to settings that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from app.flags import Given, Group, Parser
from app.sources import gather
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
)
from core.errors import ConfigError
from core.nodes import check_nodes, of_torchrun
from core.speculation import check_speculation

ENGINE_GROUPS = (
    Group("model", ModelConfig),
    Group("cache", CacheConfig),
    Group("schedule", ScheduleConfig),
    Group("speculative", SpeculativeConfig),
    Group("lora", LoraConfig),
    Group("parallel", ParallelConfig),
)
GROUPS = (*ENGINE_GROUPS, Group("serve", ServeConfig))
OFFLINE_GROUPS = (*ENGINE_GROUPS, Group("parser", ServeConfig, PARSERS))
"""Of an engine without a server."""

ALIASES = "Common flags of SGLang (--model-path, ...) and vLLM (serve MODEL, --max-model-len, ...) work too."


class GenerateFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Flags of `generate` that are not the model's."""

    input: Annotated[str, "JSONL file with one request a line", "FILE"]
    output: Annotated[str, "JSONL file that results are appended to", "FILE"]
    concurrency: Annotated[int, "requests at once; 0: chosen by device", "REQUESTS", Meta(ge=0)] = 0
    model_name: Annotated[
        str, "name that lines may give for the model besides its own; any: every name", "NAME"
    ] = ""


def make_parser() -> Parser:
    """Flags of the server."""
    return Parser("", "Serve a language model over an OpenAI-compatible HTTP API.", GROUPS, epilog=ALIASES)


def make_generate_parser() -> Parser:
    """Flags of `generate`."""
    description = (
        "Answer every line of a JSONL file: OpenAI batch lines, or objects with a prompt or messages.\n"
        "Started again with the same output it does what is left or has failed."
    )
    return Parser("generate", description, OFFLINE_GROUPS, own=GenerateFlags)


def parse(argv: Sequence[str]) -> Config:
    """Settings from command line arguments, `LOOM_*` variables and a file. Exits with 2 and a one-line
    message for a wrong one. Raises `ConfigError` for a file that cannot be read."""
    parser = make_parser()
    return settings(parser, gather(parser, argv))


def parse_generate(argv: Sequence[str]) -> tuple[Config, GenerateFlags]:
    """The same for the arguments after `generate`."""
    parser = make_generate_parser()
    given = gather(parser, argv)
    return settings(parser, given), parser.filled(given, GenerateFlags)


def settings(parser: Parser, given: Given) -> Config:
    """All groups, checked together. Exits as `parse` does."""
    config = msgspec.convert({group.title: parser.filled(given, group.kind) for group in GROUPS}, Config)
    try:
        config = msgspec.structs.replace(config, parallel=of_torchrun(config.parallel))
        check_nodes(config.parallel)
        check_speculation(config.speculative)
        adapters_at_start(config.lora)
    except ConfigError as error:
        parser.error(str(error))
    if (size := config.cache.page_size) & (size - 1):
        parser.refuse(given.origins["page_size"], f"must be a power of two, got {size}")
    if 0 < (tokens := config.schedule.step_tokens) < LEAST_STEP:
        parser.refuse(given.origins["step_tokens"], f"must be 0 or at least {LEAST_STEP}, got {tokens}")
    return config
