"""The page at `/` in headless Chromium, with a scripted engine. Skipped where there is no Chromium."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from app.engine.job import Piece
from app.http.keys import REQUEST_COUNTS
from app.service import Health, Phase
from core.config import ServeConfig
from core.types import Finish, FinishReason
from tests.rigs.browser import CHROMIUM, Tab, chromium, opened
from tests.rigs.operator import make_loaded
from tests.rigs.server import CARD, Server, Start, know
from tests.rigs.tokenizer import ByteTokenizer, JoinTemplate
from tests.rigs.tools import CALL, WEATHER
from tests.rigs.wait import until

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")

EVIL = "<img src=x onerror='document.title=1'><script>document.title=2</script>"
FENCED = ["See:\n\n``", "`h", "tml\n", EVIL, "\n```\n", "and ", EVIL]
THOUGHT = ["<think>", "\n", "hm", "\n", "</think>", "\n\n", "Sure. ", CALL]
ANSWER = "#log > .assistant:last-of-type"


@pytest.fixture(scope="module")
def devtools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of Chromium's DevTools: it takes a second to start."""
    with chromium(tmp_path_factory.mktemp("chromium")) as address:
        yield address


async def say(tab: Tab, text: str) -> None:
    await tab.type("#message", text)
    await tab.press("Enter")


async def answered(tab: Tab) -> str:
    """The answer, once nothing follows."""
    await tab.until(f"document.querySelector({ANSWER!r})?.ariaBusy === 'false'")
    return await tab.text(f"{ANSWER} .body")


async def fits(tab: Tab) -> None:
    """Check that nothing is wider than the window, and that what is typed into is in it."""
    for width, scheme in ((360, "dark"), (1600, "light")):
        await tab.look(width, 640, scheme)
        assert await tab.run("document.documentElement.scrollWidth") <= width
        assert await tab.run("document.querySelector('#send').getBoundingClientRect().bottom") <= 640


async def test_a_chat_with_a_key_behind_a_prefix(start: Start, devtools: str) -> None:
    server = await start(ServeConfig(api_key=("secret",), root_path="/llm"))
    know(server, "hermes", "think")
    async with opened(devtools, server.url + "/llm/") as tab:
        for key in ("wrong", "secret"):
            await tab.until("document.activeElement?.id === 'key'")
            await tab.type("#key", key)
            await tab.press("Enter")
            await tab.press("Enter")  # once more, by mistake
        await tab.shows("#status", "ready")
        assert await tab.run("document.querySelector('#key-form').hidden")
        await _streams(server, tab)
        await _shows_html_as_text(server, tab)
        await _calls_a_tool(server, tab)
        await fits(tab)
        assert tab.problems == []


async def _streams(server: Server, tab: Tab) -> None:
    server.engine.manual = True
    await tab.type("#system", "Be brief.")
    await say(tab, "hello")
    await until(lambda: bool(server.engine.runs))
    (run,) = server.engine.runs
    run.push(0, Piece("Good ", [1]))
    await tab.shows(ANSWER, "Good")
    assert await tab.run(f"document.querySelector({ANSWER!r}).ariaBusy") == "true"
    run.push(0, Piece("day", [2], finish=Finish(FinishReason.STOP)))
    assert await answered(tab) == "Good day"
    assert "2 tokens" in await tab.text(f"{ANSWER} .note")
    assert run.job.prompt == "system: Be brief.\nuser: hello\nassistant: "
    server.engine.manual = False


async def _shows_html_as_text(server: Server, tab: Tab) -> None:
    server.engine.scripts = [FENCED]
    await say(tab, EVIL)
    assert await answered(tab) == f"See:\n\n{EVIL}\n\nand {EVIL}"
    assert await tab.text(f"{ANSWER} [data-language=html] code") == EVIL
    assert await tab.text("#log > .user:nth-last-of-type(2)") == EVIL
    assert await tab.run("document.querySelectorAll('#log :is(img, script)').length") == 0
    assert await tab.run("document.title") == "Loom"


async def _calls_a_tool(server: Server, tab: Tab) -> None:
    server.engine.scripts = [THOUGHT, ["Snow."]]
    await tab.type("#tools", json.dumps([WEATHER]))
    await tab.type("#stop", "END\\n\nX")
    await say(tab, "And the weather?")
    await answered(tab)
    assert server.engine.runs[-1].job.text.stop == ("END\n", "X")
    assert await tab.run(f"document.querySelector('{ANSWER} .reasoning p').textContent") == "hm"
    assert "weather" in await tab.text(f"{ANSWER} .call h3")
    shown = await tab.text(f"{ANSWER} .call code")
    assert json.loads(shown) == {"city": "Ós </tool_call>lo"}
    await tab.type(f"{ANSWER} .call input", "snow")
    await say(tab, "")
    assert await answered(tab) == "Snow."
    assert str(server.engine.runs[-1].job.prompt).endswith("tool: snow\nassistant: ")


async def test_a_starting_server_says_how_far_it_is(start: Start, devtools: str) -> None:
    server = await start(ready=False)
    server.service.health = Health(Phase.STARTING, "weights", 0.432)
    async with opened(devtools, server.url + "/") as tab:
        await tab.shows("#status", "weights 43 %")
        server.service.ready(make_loaded(CARD, ByteTokenizer(), JoinTemplate(), server.engine))
        await tab.shows("#status", "ready")
        assert await tab.run("document.querySelector('#model').value") == CARD.name


async def test_stopping_and_errors(server: Server, devtools: str) -> None:
    server.engine.manual = True
    async with opened(devtools, server.url + "/") as tab:
        await tab.shows("#status", "ready")
        await say(tab, "count")
        await until(lambda: bool(server.engine.runs))
        (run,) = server.engine.runs
        run.push(0, Piece("one, ", [1]))
        await tab.shows(ANSWER, "one")
        await tab.press("Escape")
        await until(lambda: run.aborted)
        assert await answered(tab) == "one,"
        assert "stopped" in await tab.text(f"{ANSWER} .note")

        server.engine.manual = False
        await tab.run("document.querySelector('#temperature').value = -1")
        await say(tab, "go on")
        await tab.shows("#log > .error", "temperature")
        assert await tab.run("document.querySelector('#message').value") == "go on", "to send it again"
        await tab.run("document.querySelector('#temperature').value = 0.5")
        server.engine.fail_at = 2
        await tab.press("Enter")
        await tab.shows("#log > .error", "The device was lost.")
        assert await answered(tab) == "Hello"
        prompt = "user: count\nassistant: one, \nuser: go on\nassistant: "
        assert server.engine.runs[-1].job.prompt == prompt
        assert tab.problems == []


async def test_probabilities(server: Server, devtools: str) -> None:
    async with opened(devtools, server.url + "/") as tab:
        await tab.shows("#status", "ready")
        await tab.run("document.querySelector('#logprobs').checked = true")
        await say(tab, "hello")
        await answered(tab)
        assert await tab.run(f"document.querySelectorAll('{ANSWER} .token').length") == 5
        for how in ("mouse", "keys"):
            if how == "mouse":
                place = f"document.querySelector('{ANSWER} .token').getBoundingClientRect()"
                x, y = await tab.run(f"(({{x, y}}) => [x + 2, y + 2])({place})")
                await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
            else:
                await tab.call("Input.dispatchMouseEvent", type="mouseMoved", x=1, y=1)
                await tab.until("document.querySelector('#tip').hidden")
                await tab.run(f"document.querySelector('{ANSWER} .tokens').focus()")
                await tab.press("ArrowRight")
            await tab.shows("#tip", "48.7 %")  # e^-0.72: the byte of H
            assert len((await tab.text("#tip")).splitlines()) == 5
        assert tab.problems == []


async def test_the_live_view_reads_only_while_it_is_seen(server: Server, devtools: str) -> None:
    def reads() -> int:
        return server.app[REQUEST_COUNTS]["/server_info", "GET", 200]

    async with opened(devtools, server.url + "/") as tab:
        await tab.shows("#status", "ready")
        assert reads() == 0
        await tab.run("void (window.setTimeout = (act) => { window.due = act; })")
        await tab.run("void (location.hash = '#engine')")
        await tab.until("!!window.due")
        text = await tab.text("#engine")
        assert all(shown in text for shown in ("2 waiting", "75 % busy", "25 % in use", "640 free")), text
        await tab.run("due()")
        assert reads() == 2
        await fits(tab)
        await tab.run("void (location.hash = '#chat')")
        await tab.until("document.querySelector('#engine').hidden")
        await tab.run("due()")
        assert reads() == 2
        assert tab.problems == []
