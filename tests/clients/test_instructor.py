"""instructor: structured answers, and its retry when one does not validate."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from tests.rigs.server import Server

pytestmark = pytest.mark.filterwarnings("ignore")  # warnings of pydantic

WHO = [{"role": "user", "content": "who?"}]


@pytest.fixture
def instructor() -> Any:
    return pytest.importorskip("instructor", reason="needs instructor")


@pytest.fixture
def person() -> Any:
    pydantic = pytest.importorskip("pydantic", reason="needs pydantic")
    return pydantic.create_model("Person", name=(str, ...), age=(int, pydantic.Field(ge=0)))


async def test_parse(instructor: Any, person: Any, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", ', '"age": 36}']]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        ada = await instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(
            model="org/tiny", messages=WHO, response_model=person, max_retries=0
        )
    assert (ada.name, ada.age) == ("Ada", 36)
    assert "age" in str(server.engine.runs[0].job.grammar)


async def test_an_invalid_answer_is_retried(instructor: Any, person: Any, server: Server) -> None:
    server.engine.scripts = [['{"name": "Ada", "age": -1}'], ['{"name": "Ada", "age": 36}']]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key="none", max_retries=0) as client:
        ada = await instructor.from_openai(client, mode=instructor.Mode.JSON_SCHEMA).chat.completions.create(
            model="org/tiny", messages=WHO, response_model=person, max_retries=2
        )
    assert ada.age == 36
    assert len(server.engine.runs) == 2
