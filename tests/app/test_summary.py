"""The last lines of a start can be followed by somebody who has never seen Loom."""

from __future__ import annotations

import json
import shlex

import msgspec
import pytest

from app.listen import Address
from app.service import Loaded
from app.summary import summary
from core.config import ServeConfig
from core.models import Task
from tests.rigs.engine import FakeEngine
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate

HERE = Address("http://127.0.0.1:8000")
MEMORY = ("weights 1.00 GiB", "KV pool 4.00 GiB")


def loaded(task: Task = "generate", template: str = "{{ messages }}") -> Loaded:
    joined = JoinTemplate()
    joined.source = template
    return make_loaded(msgspec.structs.replace(CARD, task=task), ByteTokenizer(), joined, FakeEngine())


def curl(lines: list[str]) -> list[str]:
    (line,) = (line for line in lines if "curl" in line)
    return shlex.split(line[line.index("curl") :])


def test_it_names_url_model_context_memory_and_the_end() -> None:
    text = "\n".join(summary(HERE, ServeConfig(drain_timeout=7), loaded(), MEMORY))
    for word in (HERE.url, CARD.name, f"{CARD.context_length:,} tokens", *MEMORY, "Ctrl-C", "7 s"):
        assert word in text


def test_it_says_whose_layers_run() -> None:
    own = loaded()
    card = msgspec.structs.replace(own.card, implementation="transformers")
    through = summary(HERE, ServeConfig(), msgspec.structs.replace(own, card=card), MEMORY)
    assert any("model" in line and line.endswith("through transformers") for line in through)
    assert "transformers" not in "".join(summary(HERE, ServeConfig(), own, MEMORY))


@pytest.mark.parametrize(
    ("task", "template", "path"),
    [
        ("generate", "{{ messages }}", "/v1/chat/completions"),
        ("generate", "", "/v1/completions"),
        ("embed", "", "/v1/embeddings"),
        ("classify", "", "/v1/classify"),
    ],
)
def test_the_request_is_one_that_the_model_can_answer(task: Task, template: str, path: str) -> None:
    words = curl(summary(HERE, ServeConfig(), loaded(task, template), MEMORY))
    assert words[1] == HERE.url + path
    assert json.loads(words[words.index("-d") + 1])


def test_a_key_is_named_and_not_shown() -> None:
    lines = summary(HERE, ServeConfig(api_key=("secret",)), loaded(), MEMORY)
    assert "Authorization: Bearer $LOOM_API_KEY" in curl(lines)
    assert "secret" not in "\n".join(lines)


@pytest.mark.parametrize("remote", [False, True])
@pytest.mark.parametrize("keys", [(), ("secret",)])
def test_a_server_that_is_open_to_other_hosts_says_so(remote: bool, keys: tuple[str, ...]) -> None:
    lines = summary(HERE._replace(remote=remote), ServeConfig(api_key=keys), loaded(), MEMORY)
    assert any("--api-key" in line for line in lines) == (remote and not keys)


def test_the_certificate_is_named_to_curl() -> None:
    words = curl(summary(HERE, ServeConfig(ssl_certfile="/c.pem"), loaded(), MEMORY))
    assert words[2:4] == ["--cacert", "/c.pem"]


def test_a_socket_is_named_to_curl() -> None:
    words = curl(summary(Address("http://localhost", "/run/my loom"), ServeConfig(), loaded(), MEMORY))
    assert words[1:4] == ["--unix-socket", "/run/my loom", "http://localhost/v1/chat/completions"]
