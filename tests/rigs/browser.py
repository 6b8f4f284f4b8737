"""Headless Chromium over its DevTools protocol, which needs no driver and no package."""

from __future__ import annotations

import asyncio
import base64
import shutil
import subprocess
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from itertools import count
from pathlib import Path
from typing import Any

import aiohttp

from tests.rigs.wait import PATIENCE

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = (
    "--headless",
    "--no-sandbox",  # as root there is none
    "--disable-gpu",
    "--disable-dev-shm-usage",
    "--disable-extensions",
    "--disable-background-networking",
    "--no-first-run",
    "--remote-debugging-port=0",
)


@contextmanager
def chromium(profile: Path) -> Iterator[str]:
    """Start Chromium. Yields the address of its DevTools, as http://127.0.0.1:PORT."""
    process = subprocess.Popen(
        [str(CHROMIUM), *FLAGS, f"--user-data-dir={profile}", "about:blank"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stderr is not None
    try:
        told = "DevTools listening on ws://"
        line = next(line for line in process.stderr if line.startswith(told))
        yield "http://" + line.removeprefix(told).partition("/")[0]
    finally:
        process.kill()
        process.communicate()


class Tab:
    """A page of Chromium. `problems` are its uncaught exceptions, and what its security policy refused."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._numbers = count(1)
        self.problems: list[str] = []

    async def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """The result of a method of the protocol."""
        number = next(self._numbers)
        await self._socket.send_json({"id": number, "method": method, "params": parameters})
        while True:
            message = await self._socket.receive_json(timeout=PATIENCE)
            if message.get("id") == number:
                assert "error" not in message, message
                return message["result"]
            self._note(message)

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.exceptionThrown", "params": {"exceptionDetails": details}}:
                self.problems.append(str(details))
            case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                if entry["source"] != "network":  # statuses of answers
                    self.problems.append(entry["text"])

    async def run(self, expression: str) -> Any:
        """The value of a JavaScript expression."""
        answer = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    async def until(self, expression: str) -> Any:
        """Wait for an expression that is true; returns its value."""
        async with asyncio.timeout(PATIENCE):
            while not (value := await self.run(expression)):
                assert not self.problems, self.problems  # what is waited for may never be
                await asyncio.sleep(0.01)
        return value

    async def text(self, selector: str) -> str:
        """The text of an element as a user sees it; empty if there is none."""
        return await self.run(f"document.querySelector({selector!r})?.innerText ?? ''")

    async def shows(self, selector: str, text: str) -> None:
        """Wait until the element has this text in it."""
        await self.until(f"document.querySelector({selector!r})?.innerText.includes({text!r})")

    async def click(self, selector: str) -> None:
        """Click an element."""
        await self.run(f"document.querySelector({selector!r}).click()")

    async def type(self, selector: str, text: str) -> None:
        """Replace the text of a field, as a keyboard does."""
        await self.run(f"document.querySelector({selector!r}).select()")
        await self.call("Input.insertText", text=text)

    async def press(self, key: str) -> None:
        """Press and release a key."""
        text = {"text": "\r"} if key == "Enter" else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key)

    async def look(self, width: int, height: int, scheme: str = "light") -> None:
        """Set the size of the window, and the colour scheme that the user prefers."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": False}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        await self.call("Emulation.setEmulatedMedia", features=features)

    async def shoot(self, path: Path) -> None:
        """Save what is seen as a PNG."""
        path.write_bytes(base64.b64decode((await self.call("Page.captureScreenshot"))["data"]))


@asynccontextmanager
async def opened(devtools: str, url: str) -> AsyncIterator[Tab]:
    """A new tab with a page, in a wide window."""
    async with aiohttp.ClientSession() as http:
        async with http.put(devtools + "/json/new?about:blank") as response:
            target = await response.json(content_type=None)
        async with http.ws_connect(target["webSocketDebuggerUrl"], max_msg_size=0) as socket:
            tab = Tab(socket)
            for domain in ("Runtime", "Log", "Page"):
                await tab.call(f"{domain}.enable")
            await tab.look(1200, 800)
            await tab.call("Page.navigate", url=url)
            try:
                yield tab
            finally:
                await tab.call("Page.close")
