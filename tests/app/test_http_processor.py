"""`custom_logit_processor`: the spellings, what is refused, and the operator's function at work."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest

from app.offline import LLM
from bench.chaos.tiny import dummy_model
from core.errors import ConfigError, EngineFailed, RequestError
from tests.rigs.requests import CHAT, COMPLETIONS, GENERATE, body
from tests.rigs.server import Server

PICKLED = json.dumps({"callable": "80049563000000000000008c0a646978742e5f64696c6c94" * 20})
"""Pickled code, as SGLang's clients send it."""


@pytest.fixture
def named(server: Server) -> Server:
    server.engine.processors = ("ban", "lift")
    return server


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS, GENERATE])
async def test_name_and_params_reach_the_engine(named: Server, path: str) -> None:
    fields = {"custom_logit_processor": "ban", "custom_params": {"tokens": [1], "who": "né"}}
    await named.ask(path, body(path, fields))
    params = named.engine.runs[-1].params
    assert params.processor == "ban"
    assert json.loads(params.processor_params) == fields["custom_params"]


@pytest.mark.parametrize(
    "asked",
    [
        {"custom_logit_processor": "ban", "sampling_params": {"custom_params": {"a": 1}}},
        {"custom_logit_processor": "ban", "custom_params": {"a": 1}, "sampling_params": {}},
        {"custom_logit_processor": "ban", "custom_params": {"a": 1}},
    ],
)
async def test_beside_the_sampling_params_as_sglang_has_it(named: Server, asked: dict[str, Any]) -> None:
    await named.ask(GENERATE, {"text": "a", **asked})
    params = named.engine.runs[-1].params
    assert (params.processor, params.processor_params) == ("ban", '{"a":1}')


@pytest.mark.parametrize("fields", [{}, {"custom_logit_processor": None}, {"custom_logit_processor": ""}])
async def test_nothing_is_the_default(named: Server, fields: dict[str, Any]) -> None:
    await named.post(COMPLETIONS, body(COMPLETIONS, {**fields, "custom_params": {"a": 1}}))
    params = named.engine.runs[-1].params
    assert (params.processor, params.processor_params) == ("", "")


@pytest.mark.parametrize("sent", [PICKLED, "os.system", "unknown", "gASVAAAA"])
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
async def test_code_and_strangers_are_refused(named: Server, path: str, sent: str) -> None:
    status, answer = await named.post(path, body(path, {"custom_logit_processor": sent}))
    assert status == 400
    error = answer["error"]
    assert (error["param"], error["code"]) == ("custom_logit_processor", "unsupported")
    assert "ban, lift" in error["message"]
    assert sent not in error["message"]


async def test_generate_refuses_too(server: Server) -> None:
    error = await server.refused(GENERATE, {"text": "a", "custom_logit_processor": PICKLED})
    assert error["param"] == "custom_logit_processor"
    assert "--logit-processor" in error["message"]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"custom_logit_processor": ["ban"]}, "custom_logit_processor"),
        ({"custom_logit_processor": "ban", "custom_params": [1]}, "custom_params"),
        ({"custom_logit_processor": "ban", "custom_params": {"a": "x" * 70_000}}, "custom_params"),
        ({"custom_logit_processor": "ban", "custom_params": {"a": [[]]}}, None),
    ],
)
async def test_fields_of_another_kind(named: Server, fields: dict[str, Any], param: str | None) -> None:
    status, answer = await named.post(COMPLETIONS, body(COMPLETIONS, fields))
    assert status == (400 if param else 200)
    assert param is None or answer["error"]["param"] == param


# -- the real engine --------------------------------------------------------------------------------

HERE = "tests.rigs.processors"


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = dummy_model(tmp_path_factory.mktemp("dummy"))
    flag = f"only={HERE}:only,broken={HERE}:broken"
    with LLM(str(model), device="cpu", load_format="dummy", kv_tokens=4096, logit_processor=flag) as loaded:
        yield loaded


def test_it_decides_the_text(llm: LLM) -> None:
    asked: dict[str, Any] = {"custom_logit_processor": "only", "max_tokens": 5, "ignore_eos": True, "seed": 3}
    outputs = llm.generate(["one", "another"], **asked, custom_params={"token": 60})
    assert [output.token_ids for output in outputs] == [[60, 61, 62, 63, 64]] * 2


def test_one_that_raises_ends_its_request_only(llm: LLM) -> None:
    free = llm.generate("one", temperature=0, max_tokens=40, ignore_eos=True)
    with pytest.raises(EngineFailed, match="The logit processor 'broken' failed: ValueError"):
        llm.generate("one", custom_logit_processor="broken", max_tokens=40)
    assert llm.failure is None
    again = llm.generate("one", temperature=0, max_tokens=40, ignore_eos=True)
    assert again[0].token_ids == free[0].token_ids


def test_an_unknown_name_is_refused_by_the_engine(llm: LLM) -> None:
    with pytest.raises(RequestError) as error:
        llm.generate("one", custom_logit_processor="stranger")
    assert error.value.param == "custom_logit_processor"


def test_a_module_that_is_not_there_stops_the_start(tmp_path_factory: pytest.TempPathFactory) -> None:
    model = dummy_model(tmp_path_factory.mktemp("dummy"))
    with pytest.raises(ConfigError, match="no_such_module"):
        LLM(
            str(model),
            device="cpu",
            load_format="dummy",
            kv_tokens=4096,
            logit_processor="a=no_such_module:f",
        )
