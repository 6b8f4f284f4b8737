"""`chat_template` in a request: refused until the operator trusts clients with it, then rendered like the
model's own."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from app.text.template import ChatTemplate
from core.config import ServeConfig
from tests.rigs.server import Server
from tests.rigs.wait import until

CHAT, TOKENIZE, RESPONSES = "/v1/chat/completions", "/tokenize", "/v1/responses"
HI = [{"role": "user", "content": "hi"}]
OWN = "{% for m in messages %}[{{ m.content }}]{% endfor %}"
SLOW = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
"""Stopped after 0.1 s in each of the probes, and after 1 s."""


def trust(server: Server) -> None:
    loaded = server.service.loaded
    template: Any = ChatTemplate("model")
    server.service.ready(
        msgspec.structs.replace(
            loaded, template=template, settings=ServeConfig(trust_request_chat_template=True)
        )
    )


@pytest.mark.parametrize("path", [CHAT, TOKENIZE, CHAT + "/render", CHAT + "/batch", RESPONSES])
async def test_it_is_refused_by_default_with_the_flag_that_allows_it(server: Server, path: str) -> None:
    body = {"input": "hi"} if path == RESPONSES else {"messages": [HI] if path.endswith("batch") else HI}
    status, answer = await server.post(path, {**body, "chat_template": OWN})
    assert (status, answer["error"]["param"]) == (400, "chat_template")
    assert "--trust-request-chat-template" in answer["error"]["message"]
    assert not server.engine.runs


async def test_where_clients_are_trusted_it_takes_the_place_of_the_model_s(server: Server) -> None:
    trust(server)
    asked = {"messages": HI, "return_prompt_text": True}
    assert (await server.post(CHAT, asked))[1]["prompt_text"] == "model"
    assert (await server.post(CHAT, {**asked, "chat_template": OWN}))[1]["prompt_text"] == "[hi]"
    told = (await server.post(TOKENIZE, {"messages": HI, "chat_template": OWN}))[1]
    assert told["tokens"] == list(b"[hi]")


@pytest.mark.parametrize(
    ("source", "param"),
    [
        ("{% for %}", "chat_template"),
        ("x" * 40_000, "chat_template"),
        (5, "chat_template"),
        ("{{ raise_exception('no') }}", "messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "messages"),
        ("{{ 'x' * 10 ** 10 }}", "messages"),
    ],
)
async def test_a_bad_one_is_a_400_and_nothing_runs(server: Server, source: object, param: str) -> None:
    trust(server)
    assert (await server.refused(CHAT, {"messages": HI, "chat_template": source}))["param"] == param
    assert not server.engine.runs


async def test_one_that_is_killed_leaves_the_loop_and_the_next_one_alone(
    server: Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the sandbox stops it: what outlasts every look at its clock can be stopped in a process only."""
    trust(server)
    monkeypatch.setattr("app.text.request_template.SECONDS", 0.3)
    slow = {"messages": HI, "chat_template": SLOW}
    killed = asyncio.ensure_future(server.post(CHAT, slow))
    fine = asyncio.ensure_future(server.post(CHAT, {"messages": HI}))
    assert (await fine)[0] == 200, "the model's own template waits for nobody's"
    assert len(server.engine.runs) == 1
    status, answer = await killed
    assert (status, answer["error"]["param"], len(server.engine.runs)) == (400, "chat_template", 1)
    assert "longer than 0.3 s" in answer["error"]["message"]
    monkeypatch.undo()
    asked = {"messages": HI, "return_prompt_text": True, "chat_template": OWN}
    assert (await server.post(CHAT, asked))[1]["prompt_text"] == "[hi]"


async def test_a_client_that_leaves_takes_its_rendering_along(server: Server) -> None:
    trust(server)
    body = {"messages": HI, "chat_template": SLOW}
    leaver = asyncio.ensure_future(server.post(CHAT, body))
    helper: Any = server.service.loaded.helper
    await until(lambda: helper._child is not None)
    leaver.cancel()
    asked = {"messages": HI, "return_prompt_text": True, "chat_template": OWN}
    assert (await server.post(CHAT, asked))[1]["prompt_text"] == "[hi]"
