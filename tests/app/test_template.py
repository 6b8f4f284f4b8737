"""Chat templates render as transformers renders them, and none can hold the server."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from app.api.request.messages import check_messages, generation_prompt
from app.helper.process import HelperProcess
from app.text.request_template import KEPT, MAX_SOURCE, Renderer, RequestTemplate
from app.text.template import TIME_LIMIT, ChatTemplate, read_template
from core.errors import ModelError, RequestError
from tests.rigs.assets import asset

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
PARTS = "{% for m in messages %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endfor %}"
BOTH = (
    "{% for m in messages %}{% if m.content is string %}{{ m.content }}"
    "{% else %}{% for part in m.content %}[{{ part.text }}]{% endfor %}{% endif %}{% endfor %}"
)
USER = [{"role": "user", "content": "hi"}]


def refused(template: ChatTemplate, messages: Any = USER, **arguments: Any) -> RequestError:
    with pytest.raises(RequestError) as caught:
        template.render(messages, **arguments)
    return caught.value


def test_a_conversation() -> None:
    template = ChatTemplate(CHATML)
    assert template.render(USER) == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert template.render(USER, add_generation_prompt=False) == "<|im_start|>user\nhi<|im_end|>\n"


def test_special_tokens_arguments_and_tools_reach_the_template() -> None:
    source = "{{ bos_token }}{{ tools | tojson }}{% if thinking %}yes{% endif %}{{ messages[0]['content'] }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    tool = {"type": "function", "function": {"name": "f<é>"}}
    text = template.render(USER, tools=[tool], thinking=True)
    assert text == "<s>" + json.dumps([tool], ensure_ascii=False) + "yeshi"
    assert template.render(USER) == "<s>nullhi"


@pytest.mark.parametrize("name", ["messages", "bos_token", "raise_exception", "range"])
def test_arguments_cannot_take_the_place_of_what_is_the_servers(name: str) -> None:
    template = ChatTemplate(CHATML, {"bos_token": "<s>"})
    with pytest.raises(RequestError) as caught:
        template.render(USER, **{name: "x"})
    assert caught.value.param == "chat_template_kwargs"


def test_transformers_settings() -> None:
    template = ChatTemplate(
        "{%- for m in messages %}\n    {% if loop.first %}\n  A{{ loop.length }}\n"
        "  {% endif %}\n{% break %}\n{% endfor %}"
        "{% generation %}G{% endgeneration %}{{ strftime_now('%%') }}{{ '<&>' | tojson }}"
        "{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}{{ dict(a=1) | tojson(indent=1) }}"
    )
    assert template.render(USER) == '  A1\nG%"<&>"2{\n "a": 1\n}'


def test_text_parts_are_joined_where_the_template_prints_text() -> None:
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = check_messages([{"role": "user", "content": parts}])
    assert "user\none\ntwo<" in ChatTemplate(CHATML).render(messages)
    assert ChatTemplate(BOTH).render(messages) == "one\ntwo"


def test_text_becomes_a_part_where_the_template_wants_parts() -> None:
    assert ChatTemplate(PARTS).render(USER) == "[hi]"
    parts = [{"type": "text", "text": "one"}, {"type": "text", "text": "two"}]
    messages = check_messages([{"role": "user", "content": parts}])
    assert ChatTemplate(PARTS).render(messages) == "[one\ntwo]"


@pytest.mark.parametrize(
    ("part", "field"),
    [
        ({"type": "image_url", "image_url": {"url": "x"}}, ""),
        ({"type": "text"}, ".text"),
        ({"type": "text", "text": 1}, ".text"),
        (5, ""),
        (None, ""),
    ],
)
def test_a_part_that_is_no_text_is_named(part: object, field: str) -> None:
    messages = [
        {"role": "system", "content": "s"},
        {"role": "user", "content": [{"type": "text", "text": "a"}, part]},
    ]
    with pytest.raises(RequestError) as caught:
        check_messages(messages)
    assert caught.value.param == f"messages[1].content[1]{field}"


def test_the_last_message_can_be_left_open() -> None:
    template = ChatTemplate(CHATML)
    messages = [*USER, {"role": "assistant", "content": "The answer is "}]
    text = template.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("<|im_start|>assistant\nThe answer is ")
    trimming = ChatTemplate(CHATML.replace("message.content", "message.content | trim"))
    text = trimming.render(messages, add_generation_prompt=False, continue_final_message=True)
    assert text.endswith("assistant\nThe answer is")
    assert generation_prompt(None, True) == (False, True)
    with pytest.raises(RequestError) as caught:
        generation_prompt(True, True)
    assert caught.value.param == "continue_final_message"
    blind = ChatTemplate("{{ messages[0].content }}")
    error = refused(blind, messages, continue_final_message=True, add_generation_prompt=False)
    assert error.param == "continue_final_message"


@pytest.mark.parametrize("content", [None, "", []])
def test_calls_are_rendered_by_templates_that_look_for_a_missing_content(content: object) -> None:
    """DeepSeek-V3's renders calls only where the content is None; others would print "None"."""
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments | tojson }}{% endfor %}"
    loop, end = "{% for m in messages %}", "{% endfor %}"
    none = ChatTemplate(loop + "{% if m.content is none %}" + calls + "{% endif %}" + end)
    prints = ChatTemplate(loop + "{{ m.content }}" + calls + end)
    call = {"type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    messages = check_messages([*USER, {"role": "assistant", "content": content, "tool_calls": [call]}])
    assert none.render(messages, add_generation_prompt=False) == '{"x": 1}'
    assert prints.render(messages, add_generation_prompt=False) == 'hi{"x": 1}'


def test_tool_arguments_come_as_the_template_reads_them() -> None:
    loop = "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}"
    end = "{% endfor %}{% endfor %}"
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"x": [1]}'}}
    messages = [*USER, {"role": "assistant", "content": "", "tool_calls": [call]}]
    objects = ChatTemplate(loop + "{{ c.function.arguments | tojson }}" + end)
    assert objects.render(messages) == 'hi{"x": [1]}'
    texts = ChatTemplate(loop + "{{ 'f' + c.function.arguments }}" + end)
    assert texts.render(messages) == 'hif{"x": [1]}'


def test_no_template_says_what_to_do() -> None:
    template = ChatTemplate(None)
    assert template.source == ""
    assert "/v1/completions" in refused(template).message


def test_errors_of_the_template_are_the_requests() -> None:
    with pytest.raises(RequestError) as caught:
        check_messages([])
    assert caught.value.param == "messages"
    error = refused(ChatTemplate("{{ raise_exception('roles must\nalternate') }}"))
    assert (error.param, "roles must alternate" in error.message) == ("messages", True)
    for source in ("{{ a.b.c }}", "{{ 'a' + 1 }}", "{{ 1 // 0 }}", "{{ [][3].x }}", "{% include 'x' %}"):
        assert refused(ChatTemplate(source)).param == "messages"


@pytest.mark.parametrize("source", ["{% if %}", "{{ x | nothing }}", "{% for x in y %}", "x" * 2_000_000])
def test_what_does_not_compile_is_the_operators(source: str) -> None:
    with pytest.raises(ModelError):
        ChatTemplate(source)


def test_templates_are_found_in_their_three_places(tmp_path: Path) -> None:
    assert read_template(tmp_path) is None
    named = [{"name": "tool_use", "template": "T"}, {"name": "default", "template": "D"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_template(tmp_path) == "D"
    (tmp_path / "chat_template.json").write_text('{"chat_template": "J"}')
    assert read_template(tmp_path) == "J"
    (tmp_path / "chat_template.jinja").write_text("F")
    assert read_template(tmp_path) == "F"
    assert ChatTemplate.load(tmp_path, "override").render(USER) == "override"
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff")
    with pytest.raises(ModelError):
        read_template(tmp_path)


# -- hostile templates -----------------------------------------------------------------------------

_R = "range(99999)"
ENDLESS = [
    "{% for a in R %}{% for b in R %}{% endfor %}{% endfor %}",
    "{% for a in R %}{% for b in R %}{% for c in R %}{{ c }}{% endfor %}{% endfor %}{% endfor %}",
    "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
    "{% for a in R if namespace(x=a).x < 0 %}{% endfor %}" * 20,
    "{% set ns = namespace(s='x') %}{% for a in R %}{% for b in R %}"
    "{% set ns.s = ns.s ~ 'x' %}{% endfor %}{% endfor %}",
    "{% for x in [[1, 2]] * 50 recursive %}"
    "{{ loop(R) if x is iterable else '' }}{{ loop([[1]] * 50) }}{% endfor %}",
    "{% for a in R %}{% set x = R | map('string') | list | length %}{% endfor %}",
    "{% set ns = namespace(g=R) %}{% for a in range(200) %}{% set ns.g = ns.g | select %}{% endfor %}"
    "{{ ns.g | list | length }}",
]
HUGE = [
    "{% for a in range(10 ** 12) %}{% endfor %}",
    "{{ 'x' * 10 ** 10 }}",
    "{{ [0] * 10 ** 10 }}",
    "{{ 9 ** (9 ** 9) }}",
    "{% set ns = namespace(s='x') %}{% for a in R %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
    "{% set ns = namespace(s='x') %}{% for a in R %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
    "{% set ns = namespace(n=9) %}{% for a in R %}{% set ns.n = ns.n * ns.n %}{% endfor %}",
    "{% set ns = namespace(l=[1]) %}"
    "{% for a in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l }}",
    "{% set ns = namespace(l=[1]) %}"
    "{% for a in range(60) %}{% set ns.l = [ns.l, ns.l] %}{% endfor %}{{ ns.l | tojson }}",
    "{% set n = namespace(l=[1], m=[1]) %}"
    "{% for a in range(60) %}{% set n.l = [n.l, n.l] %}"
    "{% set n.m = [n.m, n.m] %}"
    "{% endfor %}{{ n.l == n.m }}",
    "{{ 'x' | center(10 ** 10) }}",
    "{{ 'x'.ljust(10 ** 10) }}",
    "{{ '%10000000000d' % 1 }}",
    "{{ '%*d' % (10 ** 9, 1) }}",
    "{{ '{:>10000000000}'.format(1) }}",
    "{{ '{:{w}}'.format(1, w='1000000000') }}",
    "{{ '%10000000000d' | format(1) }}",
    "{{ ('x' * 10 ** 5) | replace('x', 'y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 5).replace('x', 'y' * 10 ** 5) }}",
    "{{ ('x' * 10 ** 6).join(['a'] * 10 ** 5) }}",
    "{{ (['a'] * 10 ** 5) | join('x' * 10 ** 6) }}",
    "{{ ('x\\n' * 10 ** 5) | indent('y' * 10 ** 5) }}",
    "{{ [1] | tojson(indent=10 ** 10) }}",
    "{{ 1.5 | round(10 ** 9) }}",
    "{{ ([[1] * 10 ** 5] * 10 ** 4) | sum(start=[]) | length }}",
    "{% set big = 'x' * 10 ** 6 %}{% set s %}{% for a in R %}{{ big }}{% endfor %}{% endset %}",
    "{% set big = 'x' * 10 ** 6 %}{% for a in R %}{{ big }}{% endfor %}",
    "{{ ('a' * 10 ** 7).strip('b' * 10 ** 6 + 'a') }}",
    "{{ ('%(a)9999d' * 10 ** 4) % {'a': 1} > '' }}",
    "{{ ('%(a)s' * 10 ** 3) % {'a': 'x' * 10 ** 5} > '' }}",
    "{{ ('{0}' * 10 ** 3).format('x' * 10 ** 5) > '' }}",
    "{{ ('\\t' * 10 ** 3).expandtabs(10 ** 5) > '' }}",
    "{{ ('a' * 10 ** 6).translate({97: 'b' * 99}) > '' }}",
    "{{ ('x' * 10 ** 3).join(R | map('string')) > '' }}",
    "{{ ('a' * 10 ** 6) | batch(1) | list | length }}",
    "{{ ('a' * 10 ** 6) | sort | length }}",
    "{{ ('a ' * 10 ** 6) | title }}",
    "{{ ('a' * 50000) | min(attribute='0' ~ '.0' * 100) }}",
    "{{ ('f' * 10 ** 5) | int(0, 16) // 3 > 0 }}",
    "{{ (1).from_bytes('a'.encode()) }}",
]
NESTED = (
    "{% set ns = namespace(l=[1], m=[1]) %}{% for a in range(20) %}"
    "{% set ns.l = [ns.l, ns.l] %}{% set ns.m = [ns.m, ns.m] %}{% endfor %}"
)
"""With 60 in place of 20 such a value would never be printed or compared."""


@pytest.mark.parametrize("source", ENDLESS)
def test_endless_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # A shorter limit: each of these also ends eight probes of the template.
    monkeypatch.setattr("app.text.template.TIME_LIMIT", 0.01)
    template = ChatTemplate(source.replace("R", _R))
    began = time.thread_time()
    error = refused(template)
    assert error.param == "messages"
    assert time.thread_time() - began < 10 * 0.1  # stopped near its deadline, not at its end


@pytest.mark.parametrize("source", HUGE)
def test_huge_values_are_never_made(source: str) -> None:
    error = refused(ChatTemplate(source.replace("R", _R)))
    assert error.param == "messages"


@pytest.mark.parametrize(
    "reads",
    [
        "{{ ns.l | upper }}",
        "{{ '%s' | format(ns.l) }}",
        "{{ '{}'.format(ns.l) }}",
        "{{ 'a' | replace(ns.l, '') }}",
        "{{ ns.l is upper }}",
        "{{ raise_exception(ns.l) }}",
        "{{ messages[ns.l].x }}",
        "{{ [[ns.l], [ns.m]] | map(attribute=0) | sort | length }}",
        "{% for a in [ns.l, ns.m] %}{{ loop.changed(a) }}{% endfor %}",
    ],
)
def test_nothing_reads_a_value_that_is_nested_without_bounds(reads: str) -> None:
    assert "was stopped: a value is larger" in refused(ChatTemplate(NESTED + reads)).message


def test_a_value_nested_without_bounds_may_be_passed_on() -> None:
    passes = "{{ ns }}{{ ns.l | length }}{% macro f(l) %}{{ l | first | length }}{% endmacro %}{{ f(ns.l) }}"
    assert ChatTemplate(NESTED + passes).render(USER) == "<Namespace>22"


def test_half_a_character_in_an_error_is_no_error_of_the_server() -> None:
    assert refused(ChatTemplate("{{ raise_exception('a\\ud800') }}")).message.encode().endswith(b": a?")


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.__class__.__base__.__subclasses__() }}",
        "{{ raise_exception.__globals__['__builtins__'] }}",
        "{{ cycler.__init__.__globals__.os.popen('id').read() }}",
        "{{ namespace.__init__.__globals__ }}",
        "{{ self.__init__.__globals__.__builtins__ }}",
        "{{ dict.__class__.__mro__ | list }}",
        "{{ ''['__class__']['__mro__'] }}",
        "{{ '' | attr('__class__') | attr('__mro__') }}",
        "{{ [''] | map(attribute='__class__') | map(attribute='__mro__') | list }}",
        "{{ '{0.__class__.__mro__}'.format('') }}",
        "{{ ''.format_map.__self__.__class__.__mro__ }}",
        "{% set ns = namespace(__class__=1) %}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'a': 1}) }}",
    ],
)
def test_gadgets_find_no_way_out(source: str, watched: Callable[[], list[str]]) -> None:
    template = ChatTemplate(source)
    watched()
    try:
        text = template.render(USER)
    except RequestError:
        text = ""
    assert "class" not in text and "builtins" not in text
    assert watched() == []


@pytest.fixture(scope="module")
def watched() -> Callable[[], list[str]]:
    """Hands over the files, processes and connections that Python began since the last call."""
    names = frozenset(
        ("open", "os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
    )
    events: list[str] = []
    sys.addaudithook(lambda event, _: events.append(event) if event in names else None)  # there for good

    def take() -> list[str]:
        taken = list(events)
        events.clear()
        return taken

    return take


async def test_long_conversations_leave_the_loop() -> None:
    template = ChatTemplate("{{ where() }}{% for m in messages %}{{ m.content }}{% endfor %}")
    here = str(threading.get_ident())
    short = await template.render_async(USER, where=threading.get_ident)
    assert short == here + "hi"
    long = [{"role": "user", "content": "word " * 5_000}]
    many = await asyncio.gather(*(template.render_async(long, where=threading.get_ident) for _ in range(8)))
    assert all(text.endswith("word ") and not text.startswith(here) for text in many)
    template.close()


async def test_a_runaway_template_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.text.template.TIME_LIMIT", 0.05)
    template = ChatTemplate(ENDLESS[0].replace("R", _R))
    turns = 0
    done = asyncio.ensure_future(template.render_async(USER))
    while not done.done():
        await asyncio.sleep(0)
        turns += 1
    assert isinstance(done.exception(), RequestError)
    assert turns > 2  # the loop went on while it ran
    template.close()


def test_the_limit_is_a_second() -> None:
    assert TIME_LIMIT == 1.0


@pytest.mark.parametrize("name", ["qwen3", "llama3_1", "deepseek_v3"])
def test_real_templates_render_as_plain_jinja2_does(name: str) -> None:
    """The checks woven into the template change nothing that it prints."""
    from jinja2.ext import loopcontrols
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    source = read_template(asset(f"tokenizers/{name}"))
    assert source is not None
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    plain = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols])
    plain.filters["tojson"] = lambda x, indent=None: json.dumps(x, ensure_ascii=False, indent=indent)
    plain.globals["strftime_now"] = lambda form: "today"
    tools = [
        {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    ]
    call = {"id": "abcdefghi", "type": "function", "function": {"name": "f", "arguments": '{"a": "é<"}'}}
    talk = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": " hello\n"},
        {"role": "assistant", "content": "<think>hm</think>hi"},
        {"role": "user", "content": "again"},
    ]
    used = [
        *talk,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "5"},
    ]
    template = ChatTemplate(source, special)
    for messages, offered in ((talk, None), (talk, tools), (used, None), (used, tools)):
        context = template._context(messages, tools=offered)
        assert template.render(messages, tools=offered) == plain.from_string(source).render(context)
    assert "é<" in template.render(check_messages(used), tools=tools)
    assert '"name": "f"' in template.render(talk, tools=tools)


# -- templates that requests bring -----------------------------------------------------------------


def test_half_a_character_of_a_request_s_template_is_refused() -> None:
    call = {"source": "{{ '\\ud800' }}", "messages": [{"role": "user", "content": "x"}], "options": {}}
    made = Renderer(msgspec.msgpack.encode({}))(msgspec.msgpack.encode(call))
    answer = msgspec.msgpack.decode(made)
    assert "lone surrogate" in answer["wrong"] and answer["param"] == "chat_template"


def test_templates_of_requests_are_kept_compiled_but_not_for_ever() -> None:
    made: Any = Renderer(msgspec.msgpack.encode({"bos_token": "<s>"}))
    first = made._template("{{ bos_token }}{{ messages[0].content }}")
    assert first.render(USER) == "<s>hi"
    assert made._template(first.source) is first
    for i in range(KEPT):
        made._template(f"{i}")
    assert made._template(first.source) is not first


@pytest.mark.parametrize("source", ["{% for %}", "{{" + "(" * 5_000 + "}}", "x" * (MAX_SOURCE + 1)])
async def test_a_request_s_template_that_cannot_be_taken(source: str) -> None:
    helper = HelperProcess()
    with pytest.raises(RequestError) as caught:
        await RequestTemplate(source, {}, helper).render_async(USER)
    assert caught.value.param == "chat_template"
    helper.close()


GREEDY = [
    "{% for a in R %}{% set ns.l = ns.l + ['x' * 33000000] %}{% endfor %}",
    "{% set s = 'x' * 33000000 %}{% for a in R %}{% set ns.l = [ns.l, s[1:]] %}{% endfor %}",
    "{% set s = 'x' * 33000000 %}{% for a in R %}{% set ns.l = [ns.l, s ~ a] %}{% endfor %}",
    "{% for a in R %}{% set ns.l = [ns.l, R | list] %}{% endfor %}",
    "{% for a in R %}{% set ns.l = [ns.l, dict.fromkeys(R)] %}{% endfor %}",
    "{% set s = 'x' * 10 ** 6 %}{% for a in R %}{% set t %}{{ s }}{{ s }}{% endset %}"
    "{% set ns.l = [ns.l, t] %}{% endfor %}",
]


@pytest.mark.parametrize("source", GREEDY)
def test_what_is_made_piece_by_piece_is_bounded(source: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The time it takes to get there depends on the machine; where it ends does not."""
    monkeypatch.setattr("app.text.sandbox.MAX_MADE", 2**26)
    monkeypatch.setattr("app.text.template.TIME_LIMIT", 20.0)
    monkeypatch.setattr("app.text.template.PROBE_TIME", 0.0)
    error = refused(ChatTemplate("{% set ns = namespace(l=[]) %}" + source.replace("R", _R)))
    assert "all that it makes" in error.message


def test_a_stopped_template_leaves_nothing_behind() -> None:
    """Reference counts alone must free what it made: a server seldom collects garbage."""

    class Made(str):
        """Counts those that are there."""

        __slots__ = ("__weakref__",)

    alive: list[weakref.ref[Made]] = []

    def make() -> Made:
        made = Made("x")
        alive.append(weakref.ref(made))
        return made

    template = ChatTemplate("{% set a = make() %}{% set b = [a] %}{{ raise_exception('no') }}")
    gc.disable()
    try:
        with contextlib.suppress(RequestError):  # pytest's own way to catch it would keep it
            template.render(USER, make=make)
        assert alive and not [ref for ref in alive if ref() is not None]
    finally:
        gc.enable()


# -- templates without tools -----------------------------------------------------------------------

TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
CALLED = {
    "role": "assistant",
    "content": "Sure.",
    "tool_calls": [
        {"id": "1", "type": "function", "function": {"name": "add", "arguments": '{"a": "é"}'}},
        {"id": "2", "type": "function", "function": {"name": "add", "arguments": {}}},
    ],
}
RESULTS = [{"role": "tool", "content": "one"}, {"role": "tool", "content": "two"}]
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}" + CHATML


def test_tools_that_a_template_leaves_out_are_put_into_the_system_message() -> None:
    template = ChatTemplate(CHATML)
    assert not template.shows_tools
    brief = [{"role": "system", "content": "Be brief."}, *USER]
    own, none, plain = (template.render(each, tools=[TOOL]) for each in (brief, USER, [*USER, *USER]))
    said = "# Tools\n\nYou may call one or more functions"
    assert own.startswith(f"<|im_start|>system\nBe brief.\n\n{said}") and own.count("system") == 1
    assert none.startswith(f"<|im_start|>system\n{said}") and plain.count("# Tools") == 1
    assert f"<tools>\n{json.dumps(TOOL)}\n</tools>" in own
    assert template.render(USER) == template.render(USER, tools=[])
    assert "# Tools" not in template.render(brief)


def test_the_first_user_message_takes_the_tools_where_there_is_no_system() -> None:
    template = ChatTemplate(NO_SYSTEM)
    text = template.render(USER, tools=[TOOL])
    assert text.startswith("<|im_start|>user\n# Tools") and text.count("<|im_start|>user") == 1
    assert "</tool_call>\n\nhi<|im_end|>" in text


def test_calls_and_results_become_text_where_a_template_leaves_them_out() -> None:
    for tools in (None, [TOOL]):
        text = ChatTemplate(CHATML).render([*USER, CALLED, *RESULTS, *USER], tools=tools)
        assert (
            "<|im_start|>assistant\nSure.\n"
            '<tool_call>\n{"name": "add", "arguments": {"a": "é"}}\n</tool_call>\n'
            '<tool_call>\n{"name": "add", "arguments": {}}\n</tool_call><|im_end|>\n'
            "<|im_start|>user\n<tool_response>\none\n</tool_response>\n<tool_response>\ntwo\n</tool_response>"
            "<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        ) in text


@pytest.mark.parametrize(("name", "shows"), [("qwen3", True), ("llama3_1", False), ("deepseek_v3", False)])
def test_real_templates_are_found_out(name: str, shows: bool) -> None:
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    template = ChatTemplate.load(asset(f"tokenizers/{name}"), special_tokens=special)
    assert template.shows_tools is shows
    assert ChatTemplate(None).shows_tools
