"""From a command line to settings that fit together."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import msgspec
from msgspec import Meta

from app.flags import FileFlags, Given, Group, NoFlags, Parser
from app.http import key_file
from app.process import invocation
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
from core.kv_events import kv_events
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
"""Flags of an engine without a server."""
PULL_GROUPS = (
    Group("model", ModelConfig, ("model", "revision", "hf_overrides", "tokenizer", "load_format", "offline")),
    Group("speculative", SpeculativeConfig, ("draft_model_path",)),
    Group("lora", LoraConfig, ("lora",)),
)
"""Flags that name what a start fetches."""

ALIASES = "Common flags of SGLang (--model-path, ...) and vLLM (serve MODEL, --max-model-len, ...) work too."

COMMANDS = {
    "serve": "serve a model over HTTP (the same without a command)",
    "generate": "answer a file of requests without a server",
    "chat": "talk to a model in the terminal",
    "pull": "fetch a model",
    "models": "list the architectures that are served",
    "check-config": "print the settings that flags, variables and file make, or what is wrong with them",
    "doctor": "look at versions, devices, memory, model files and port, and say what to change",
}
"""Commands by name, with what each does."""


class GenerateFlags(FileFlags, frozen=True, kw_only=True):
    """Flags of `generate` that are not the model's."""

    input: Annotated[str, "JSONL file with one request a line", "FILE"]
    output: Annotated[str, "JSONL file that results are appended to", "FILE"]
    concurrency: Annotated[int, "requests at once; 0: chosen by device", "REQUESTS", Meta(ge=0)] = 0
    model_name: Annotated[
        str, "name that lines may give for the model besides its own; any: every name", "NAME"
    ] = ""


class ChatFlags(FileFlags, frozen=True, kw_only=True):
    """Flags of `chat` that are not the model's."""

    url: Annotated[
        str,
        "a running server, as http://localhost:8000 or unix:PATH; empty: start the engine in this process",
        "URL",
    ] = ""
    system: Annotated[str, "system message", "TEXT"] = ""
    sampling: Annotated[
        str, 'fields of /v1/chat/completions, as {"temperature": 0, "max_tokens": 200}', "JSON"
    ] = ""


def make_parser(command: str = "") -> Parser:
    """Flags of a command. Those of the server, without a name, are of `check-config` and `doctor` too."""
    match command:
        case "generate":
            description = (
                "Answer every line of a JSONL file: OpenAI batch lines, or objects with a prompt or "
                "messages.\nStarted again with the same output it does what is left or has failed."
            )
            return Parser(command, description, OFFLINE_GROUPS, own=GenerateFlags)
        case "chat":
            groups = (*ENGINE_GROUPS, Group("server", ServeConfig, ("api_key", *PARSERS)))
            return Parser(command, "Talk to a model in the terminal.", groups, own=ChatFlags)
        case "pull":
            return Parser(command, "Fetch what a start with the same flags would fetch.", PULL_GROUPS)
        case "models":
            return Parser(command, "List the architectures that are served.", (), own=NoFlags)
    listed = "\n".join(f"  {name:<14} {text}" for name, text in COMMANDS.items())
    return Parser(
        command,
        COMMANDS.get(command, "Serve a language model over an OpenAI-compatible HTTP API."),
        GROUPS,
        epilog=f"{ALIASES}\n\ncommands ({invocation('COMMAND')} --help):\n{listed}",
    )


def parse(argv: Sequence[str]) -> Config:
    """Settings from command line arguments, `LOOM_*` variables and a file. Exits with 2 and a one-line
    message for a wrong one. Raises `ConfigError` for a file that cannot be read."""
    return parse_with(make_parser(), argv)[0]


def parse_generate(argv: Sequence[str]) -> tuple[Config, GenerateFlags]:
    """As `parse`, for the arguments after `generate`."""
    parser = make_parser("generate")
    config, given = parse_with(parser, argv)
    return config, parser.filled(given, GenerateFlags)


def parse_chat(argv: Sequence[str]) -> tuple[Config, ChatFlags]:
    """As `parse`, for the arguments after `chat`."""
    parser = make_parser("chat")
    config, given = parse_with(parser, argv)
    return config, parser.filled(given, ChatFlags)


def parse_with(parser: Parser, argv: Sequence[str]) -> tuple[Config, Given]:
    """Settings, and those of them that were given."""
    given = gather(parser, argv)
    return settings(parser, given), given


def settings(parser: Parser, given: Given) -> Config:
    """Settings of all groups, checked together. Exits as `parse` does."""
    config = msgspec.convert({group.title: parser.filled(given, group.kind) for group in GROUPS}, Config)
    try:
        config = msgspec.structs.replace(config, parallel=of_torchrun(config.parallel))
        check_engine(config)
        kv_events(config.cache, config.parallel.dp)
        if config.serve.api_keys_file:
            key_file.read(config.serve.api_keys_file, config.serve.api_key)
    except ConfigError as error:
        parser.error(str(error))
    if (size := config.cache.page_size) & (size - 1):
        parser.refuse(given.origins["page_size"], f"must be a power of two, got {size}")
    _check_serve(parser, given, config.serve)
    if 0 < (tokens := config.schedule.step_tokens) < LEAST_STEP:
        parser.refuse(given.origins["step_tokens"], f"must be 0 or at least {LEAST_STEP}, got {tokens}")
    return config


def check_engine(config: Config) -> None:
    """Raise `ConfigError` for settings of an engine that do not fit together."""
    check_nodes(config.parallel)
    check_speculation(config.speculative)
    adapters_at_start(config.lora)


def _check_serve(parser: Parser, given: Given, serve: ServeConfig) -> None:
    if any(not key or key != key.strip() for key in serve.api_key):  # headers are read without blanks
        parser.refuse(
            given.origins["api_key"],
            "a key must not be empty or have blanks around it: no request could send it. For no "
            "authentication, give none",
        )
    if serve.ssl_keyfile and not serve.ssl_certfile:
        parser.refuse(given.origins["ssl_keyfile"], "needs --ssl-certfile")
    if (url := serve.otlp_traces_endpoint) and not url.startswith(("http://", "https://")):
        parser.refuse(
            given.origins["otlp_traces_endpoint"],
            f"must begin with http:// or https://: OTLP over HTTP (usually port 4318, not 4317), got {url}",
        )
