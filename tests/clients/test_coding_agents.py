"""Claude Code and Codex, each as a process against a server with a scripted engine.

Needs `npm install` in `tests/clients/node`. Both run with a temporary HOME, so that no settings of the user
apply.
"""

from __future__ import annotations

import asyncio
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.rigs.server import Server, know
from tests.rigs.wait import PATIENCE

BIN = Path(__file__).parent / "node" / "node_modules" / ".bin"
CONTEXT_LENGTH = 2_000_000
"""Context length in tokens of one byte: the system prompts of the agents are long."""
TEXT = ["Hello", " there", "."]


@pytest.fixture
def wide(server: Server, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """A model with tool calls and a context length for the prompts of agents."""
    monkeypatch.setattr("tests.rigs.engine.CONTEXT", CONTEXT_LENGTH)
    know(server)
    loaded = server.service.loaded
    card = msgspec.structs.replace(loaded.card, context_length=CONTEXT_LENGTH)
    server.service.ready(msgspec.structs.replace(loaded, card=card))
    yield server


def call(name: str, **arguments: Any) -> list[str]:
    text = json.dumps({"name": name, "arguments": arguments})
    return ["<tool_call>\n", text[:20], text[20:], "\n</tool_call>"]


async def run(program: str, *arguments: str, home: Path, **environment: str) -> tuple[int, str, str]:
    """Exit code, output and errors."""
    if not (BIN / program).exists():
        pytest.skip(f"needs npm install in tests/clients/node: {program} is not installed")
    kept = {name: os.environ[name] for name in ("PATH", "TMPDIR") if name in os.environ}
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        str(BIN / program),
        *arguments,
        cwd=home,
        env={**kept, "HOME": str(home), **environment},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=pipe,
        stderr=pipe,
    )
    try:
        async with asyncio.timeout(PATIENCE):
            out, err = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


# -- Claude Code -----------------------------------------------------------------------------------


async def claude(server: Server, home: Path, *arguments: str, form: str = "json") -> tuple[int, str, str]:
    return await run(
        "claude",
        *("--bare", "--print", "--model", "org/tiny", "--output-format", form, *arguments),
        home=home,
        ANTHROPIC_BASE_URL=server.url,
        ANTHROPIC_API_KEY="none",
        CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC="1",
        CLAUDE_CODE_MAX_RETRIES="0",
        DISABLE_AUTOUPDATER="1",
    )


async def test_claude_code_chats(wide: Server, tmp_path: Path) -> None:
    wide.engine.scripts = [TEXT] * 4
    code, out, err = await claude(wide, tmp_path, "hi")
    assert code == 0, (out, err)
    result = json.loads(out)
    assert (result["result"], result["is_error"]) == ("Hello there.", False)
    assert result["usage"]["output_tokens"] >= 3


async def test_claude_code_streams(wide: Server, tmp_path: Path) -> None:
    wide.engine.scripts = [TEXT] * 4
    code, out, err = await claude(
        wide, tmp_path, "--verbose", "--include-partial-messages", "hi", form="stream-json"
    )
    assert code == 0, (out, err)
    events = [json.loads(line) for line in out.splitlines()]
    inner = [event["event"] for event in events if event["type"] == "stream_event"]
    deltas = [event["delta"]["text"] for event in inner if event["type"] == "content_block_delta"]
    assert deltas == TEXT


async def test_claude_code_uses_a_tool(wide: Server, tmp_path: Path) -> None:
    (tmp_path / "note.txt").write_text("the word is lighthouse")
    reads = call("Read", file_path=str(tmp_path / "note.txt"))
    wide.engine.scripts = [reads, TEXT, TEXT, TEXT]
    code, out, err = await claude(wide, tmp_path, "--allowedTools", "Read", "--", "hi")
    assert code == 0, (out, err)
    assert json.loads(out)["num_turns"] == 2
    assert "the word is lighthouse" in str(wide.engine.runs[1].job.prompt)


async def test_claude_code_reports_an_error(server: Server, tmp_path: Path) -> None:
    know(server)
    code, out, err = await claude(server, tmp_path, "hi")  # context length 512: its system prompt is longer
    assert code != 0 and json.loads(out)["is_error"] is True, (out, err)
    assert "too long" in out


# -- Codex -----------------------------------------------------------------------------------------


async def codex(server: Server, home: Path, *arguments: str) -> tuple[int, list[dict[str, Any]], str]:
    once = "request_max_retries=0,stream_max_retries=0"
    provider = f'{{name="loom",base_url="{server.url}/v1",wire_api="responses",{once}}}'
    code, out, err = await run(
        "codex",
        *("exec", "--json", "--skip-git-repo-check", "--sandbox", "danger-full-access"),
        *("-c", "model_provider=loom", "-c", f"model_providers.loom={provider}", "-m", "org/tiny"),
        *arguments,
        home=home,
        CODEX_HOME=str(home),
    )
    return code, [json.loads(line) for line in out.splitlines() if line.startswith("{")], err


def items(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    done = [event["item"] for event in events if event["type"] == "item.completed"]
    return [item for item in done if item["type"] == kind]


async def test_codex_streams(wide: Server, tmp_path: Path) -> None:
    wide.engine.scripts = [TEXT] * 4
    code, events, err = await codex(wide, tmp_path, "hi")
    assert code == 0, (events, err)
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there."]


async def test_codex_uses_a_tool(wide: Server, tmp_path: Path) -> None:
    runs = call("exec_command", cmd="echo light''house")
    wide.engine.scripts = [runs, TEXT, TEXT]
    code, events, err = await codex(wide, tmp_path, "hi")
    assert code == 0, (events, err)
    assert "lighthouse" in str(wide.engine.runs[1].job.prompt)
    assert [item["text"] for item in items(events, "agent_message")] == ["Hello there."]


async def test_codex_reports_an_error(wide: Server, tmp_path: Path) -> None:
    wide.engine.fail_at = 1
    code, events, err = await codex(wide, tmp_path, "hi")
    assert code != 0 and any("device was lost" in json.dumps(event) for event in events), (events, err)
