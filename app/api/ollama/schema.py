"""Bodies of Ollama's routes, and their translation to chat's fields."""

from __future__ import annotations

from typing import Any

import msgspec

from app.api.request.schema import ChatBody, CompletionBody, Int, Text
from app.service import Loaded
from core.errors import field_error, unsupported


class OllamaOptions(msgspec.Struct, kw_only=True):
    """`options`. Those for loading a model (`num_ctx`, `num_gpu`) are ignored."""

    num_predict: Int | None = None
    temperature: float | None = None
    top_k: Int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: Int | None = None
    stop: Text | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaBody(msgspec.Struct, kw_only=True):
    """Fields that `/api/chat` and `/api/generate` share."""

    model: str | None = None
    stream: bool | None = None
    """Unset means yes."""
    format: Any = None
    options: OllamaOptions | None = None
    think: bool | str | None = None
    logprobs: Any = None
    top_logprobs: Any = None
    timeout: float | None = None

    def __post_init__(self) -> None:
        self._refuse("logprobs", "top_logprobs")

    def _refuse(self, *names: str) -> None:
        for name in names:
            if getattr(self, name):
                raise field_error(name, "is not supported", "unsupported")


class OllamaChatBody(OllamaBody, kw_only=True):
    """`/api/chat`."""

    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None


class OllamaGenerateBody(OllamaBody, kw_only=True):
    """`/api/generate`."""

    prompt: str | None = None
    system: str | None = None
    raw: bool | None = None
    suffix: Any = None
    template: Any = None
    images: Any = None

    def __post_init__(self) -> None:
        super().__post_init__()
        self._refuse("suffix", "template", "images")


class OllamaShowBody(msgspec.Struct, kw_only=True):
    """`/api/show`; `name` is what it was called before."""

    model: str | None = None
    name: str | None = None


def model_name(name: str | None, loaded: Loaded) -> str | None:
    """A model's name without the tag that Ollama's clients put behind every name, unless it is ours."""
    return name if name is None or name in loaded.card.names else name.removesuffix(":latest")


def chat_body(body: OllamaChatBody | OllamaGenerateBody) -> ChatBody:
    """The request as a body of chat."""
    if isinstance(body, OllamaChatBody):
        messages, tools = [_message(each, i) for i, each in enumerate(body.messages or ())], body.tools
    else:
        system = [{"role": "system", "content": body.system}] if body.system else []
        messages, tools = [*system, {"role": "user", "content": body.prompt}], None
    request = ChatBody(messages=messages, tools=tools, response_format=_format(body.format))
    if isinstance(body.think, bool):
        request.chat_template_kwargs = {"enable_thinking": body.think}
    else:
        request.reasoning_effort = body.think
    _sampling(request, body.options)
    return request


def raw_body(body: OllamaGenerateBody) -> CompletionBody:
    """A request whose prompt needs no template, as a body of completions."""
    request = CompletionBody(prompt=body.prompt, response_format=_format(body.format))
    _sampling(request, body.options)
    return request


def _message(message: dict[str, Any], index: int) -> dict[str, Any]:
    if message.get("images"):
        param = f"messages[{index}].images"
        raise unsupported(param, "this model takes text only")
    made = {**message, "reasoning": message.get("thinking")}
    return made | ({"name": message["tool_name"]} if message.get("tool_name") else {})


def _format(format: Any) -> Any:
    if format in (None, ""):
        return None
    if format == "json":
        return {"type": "json_object"}
    if not isinstance(format, dict):
        raise field_error("format", "must be 'json' or a JSON schema")
    return {"type": "json_schema", "json_schema": {"name": "format", "schema": format}}


def _sampling(request: ChatBody | CompletionBody, options: OllamaOptions | None) -> None:
    options = options or OllamaOptions()
    for name in ("temperature", "top_k", "top_p", "min_p", "stop", "presence_penalty", "frequency_penalty"):
        setattr(request, name, getattr(options, name))
    request.repetition_penalty = options.repeat_penalty
    if options.seed is not None and options.seed >= 0:  # -1 is a random one
        request.seed = options.seed
    # -1 and -2 mean no limit.
    request.max_tokens = (
        options.num_predict if options.num_predict is None or options.num_predict >= 0 else None
    )


NAMES = {
    "response_format": "format",
    "repetition_penalty": "options.repeat_penalty",
    "max_tokens": "options.num_predict",
    **{name: f"options.{name}" for name in OllamaOptions.__struct_fields__},
}
"""Chat's names of fields and ours, as `fields_named` takes them."""
