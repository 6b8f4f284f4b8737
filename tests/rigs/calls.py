"""Tool calls as the families write them, and how they are read again."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from app.parsers.base import assemble
from app.parsers.calls import CallParser
from app.parsers.registry import TOOLS
from tests.rigs.parsers import Made, hermes, parse

NAMES = frozenset({"f", "get_weather"})


TYPES = {key: {"type": "string"} for key in ("text", "é", "tags", "json", "empty")}


SCHEMAS = {
    name: {"properties": TYPES | {"nested": {"type": "object"}, "deep": {"type": "array"}}} for name in NAMES
}
"""Schemas of the arguments, for formats that write strings bare. `a` may be anything."""


def llama(calls: Made) -> str:
    return "; ".join(f'{{"name": "{name}", "parameters": {json.dumps(args)}}}' for name, args in calls)


def llama_tagged(calls: Made) -> str:
    return "<|python_tag|>" + llama(calls)


def mistral(calls: Made) -> str:
    return "[TOOL_CALLS] " + json.dumps([{"name": name, "arguments": args} for name, args in calls])


def mistral_11(calls: Made) -> str:
    return "".join(f"[TOOL_CALLS]{name}[ARGS]{json.dumps(args)}" for name, args in calls)


def mistral_13(calls: Made) -> str:
    return "".join(f"[TOOL_CALLS]{name}[CALL_ID]a1b2c3d4e[ARGS]{json.dumps(args)}" for name, args in calls)


def deepseek(calls: Made) -> str:
    each = (
        f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{json.dumps(args)}\n```<｜tool▁call▁end｜>"
        for name, args in calls
    )
    return "<｜tool▁calls▁begin｜>" + "\n".join(each) + "<｜tool▁calls▁end｜>"


def deepseek_31(calls: Made) -> str:
    each = (
        f"<｜tool▁call▁begin｜>{n}<｜tool▁sep｜>{json.dumps(args)}<｜tool▁call▁end｜>" for n, args in calls
    )
    return "<｜tool▁calls▁begin｜>" + "".join(each) + "<｜tool▁calls▁end｜>"


def pythonic(calls: Made) -> str:
    each = (f"{name}({', '.join(f'{key}={value!r}' for key, value in args.items())})" for name, args in calls)
    return f"[{', '.join(each)}]"


def pythonic_tagged(calls: Made) -> str:
    return f"<|python_start|>{pythonic(calls)}<|python_end|>"


def tagged(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def bare(calls: Made, opening: str, argument: str, closing: str) -> Iterator[str]:
    """Each call: `opening` with its name, `argument` with each key, its value as text and whether it is a
    string, `closing`."""
    for name, args in calls:
        inner = (
            argument.format(key, tagged(value), str(isinstance(value, str)).lower())
            for key, value in args.items()
        )
        yield opening.format(name) + "".join(inner) + closing


def qwen_coder(calls: Made) -> str:
    argument = "<parameter={}>\n{}\n</parameter>\n"
    return "\n".join(bare(calls, "<tool_call>\n<function={}>\n", argument, "</function>\n</tool_call>"))


def qwen_coder_bare(calls: Made) -> str:
    return qwen_coder(calls).replace("<tool_call>\n<function", "<function").replace("\n</tool_call>", "")


def glm(calls: Made) -> str:
    argument = "<arg_key>{}</arg_key>\n<arg_value>{}</arg_value>\n"
    return "\n".join(bare(calls, "<tool_call>{}\n", argument, "</tool_call>"))


def glm_47(calls: Made) -> str:
    lines = ("</arg_key>\n<arg_value>", "</arg_value>\n<", "\n<arg_key>", "\n</tool_call>")
    text = glm(calls)
    for line in lines:
        text = text.replace(line, line.replace("\n", ""))
    return text


def kimi(calls: Made) -> str:
    each = (
        f"<|tool_call_begin|>functions.{name}:{i}<|tool_call_argument_begin|>{json.dumps(a)}<|tool_call_end|>"
        for i, (name, a) in enumerate(calls)
    )
    return f"<|tool_calls_section_begin|>{''.join(each)}<|tool_calls_section_end|>"


def gemma_value(value: Any, quote: str) -> str:
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, list):
        return f"[{','.join(gemma_value(each, quote) for each in value)}]"
    if isinstance(value, dict):
        keys = {key: key if key.isidentifier() else json.dumps(key) for key in value}
        return f"{{{','.join(f'{keys[key]}:{gemma_value(each, quote)}' for key, each in value.items())}}}"
    return json.dumps(value)


def function_gemma(calls: Made) -> str:
    each = (f"call:{name}{gemma_value(args, '<escape>')}" for name, args in calls)
    return "".join(f"<start_function_call>{one}<end_function_call>" for one in each)


def gemma_4(calls: Made) -> str:
    marks = ("<start_function_call>", "<|tool_call>"), ("<end_function_call>", "<tool_call|>")
    text = function_gemma(calls)
    for theirs, ours in (*marks, ("<escape>", '<|"|>')):
        text = text.replace(theirs, ours)
    return text


def listed(calls: Made) -> str:
    return json.dumps([{"name": name, "arguments": args} for name, args in calls], ensure_ascii=False)


def granite(calls: Made) -> str:
    return f"<|tool_call|>{listed(calls)}"


def granite_31(calls: Made) -> str:
    return f"<tool_call> {listed(calls)}"


def granite_20b(calls: Made) -> str:
    return " ".join(f"<function_call> {listed([call])[1:-1]}" for call in calls)


def phi(calls: Made) -> str:
    return f"functools{listed(calls)}"


def phi_tokens(calls: Made) -> str:
    return "".join(f"<|tool_call|>{listed([call])[1:-1]}<|/tool_call|>" for call in calls)


def olmo(calls: Made) -> str:
    lines = (pythonic([call])[1:-1] for call in calls)
    return "<function_calls>\n{}\n</function_calls>".format("\n".join(lines))


def minimax(calls: Made) -> str:
    argument = '<parameter name="{}">{}</parameter>\n'
    inner = "".join(bare(calls, '<invoke name="{}">\n', argument, "</invoke>\n"))
    return f"<minimax:tool_call>\n{inner}</minimax:tool_call>"


def dsml(calls: Made) -> str:
    argument = '<｜DSML｜parameter name="{0}" string="{2}">{1}</｜DSML｜parameter>\n'
    inner = "".join(bare(calls, '<｜DSML｜invoke name="{}">\n', argument, "</｜DSML｜invoke>\n"))
    return f"<｜DSML｜function_calls>\n{inner}</｜DSML｜function_calls>"


def dsml_4(calls: Made) -> str:
    return dsml(calls).replace("function_calls>", "tool_calls>")


def dsml_plain(calls: Made) -> str:
    return dsml(calls).replace("｜DSML｜", "")


def seed(calls: Made) -> str:
    argument, closing = "<parameter={}>{}</parameter>\n", "</function>\n</seed:tool_call>"
    return "\n".join(bare(calls, "<seed:tool_call>\n<function={}>\n", argument, closing))


WRITERS: dict[Callable[[Made], str], str] = {
    hermes: "hermes",
    llama: "llama3",
    llama_tagged: "llama3",
    mistral: "mistral",
    mistral_11: "mistral",
    mistral_13: "mistral",
    deepseek: "deepseek_v3",
    deepseek_31: "deepseek_v3",
    pythonic: "pythonic",
    qwen_coder: "qwen3_coder",
    seed: "seed_oss",
    glm: "glm",
    glm_47: "glm",
    kimi: "kimi_k2",
    function_gemma: "functiongemma",
    gemma_4: "gemma4",
    granite: "granite",
    granite_31: "granite",
    granite_20b: "granite-20b-fc",
    phi: "phi4_mini_json",
    phi_tokens: "phi4_mini_json",
    olmo: "olmo3",
    minimax: "minimax_m2",
    dsml: "deepseek_v32",
    dsml_4: "deepseek_v4",
    dsml_plain: "deepseek_v32",
}


LEADS = {"hermes": "\n", "qwen3_coder": "\n\n", "glm": "\n", "minimax_m2": "\n"}
LEADS |= dict.fromkeys(("deepseek_v32", "deepseek_v4", "seed_oss"), "\n\n")
"""Text that templates write between an answer's text and its calls."""


def parser(family: str) -> CallParser:
    return CallParser(TOOLS[family], NAMES, SCHEMAS)


def read(family: str, pieces: Iterable[str]) -> tuple[str, list[tuple[str, str]]]:
    """Content and calls."""
    message = assemble(parse(parser(family), pieces))
    return message.content, [(call.name, call.arguments) for call in message.calls]
