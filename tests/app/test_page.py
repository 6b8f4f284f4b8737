"""The page at `/` as files. What it does in a browser: `tests/clients/test_browser.py`."""

from __future__ import annotations

import re
import tomllib
from fnmatch import fnmatch

from app.api.page.routes import FILES, FOLDER
from core.config import ServeConfig
from tests.rigs.server import Start
from tests.rigs.tree import ROOT

BROWSER = {"Accept": "text/html,application/xhtml+xml,application/xml;q=0.9,*/*;q=0.8"}
MEDIA = {"js": "text/javascript", "css": "text/css", "svg": "image/svg+xml"}
SOURCES = sorted(path for path in FOLDER.iterdir() if path.suffix in (".html", ".js", ".css", ".svg"))
SAFE = {"X-Content-Type-Options": "nosniff", "Referrer-Policy": "no-referrer"}
POLICY = ("default-src 'self'", "frame-ancestors 'none'", "require-trusted-types-for 'script'")


async def test_browsers_get_the_page_and_others_what_they_got(start: Start) -> None:
    server = await start(ServeConfig(api_key=("secret",)))
    async with server.http.get("/", headers=BROWSER) as response:
        page = await response.text()
    assert response.status == 200 and response.headers["Content-Type"] == "text/html; charset=utf-8"
    assert response.headers.items() >= SAFE.items() and response.headers["Vary"] == "Accept"
    assert all(rule in response.headers["Content-Security-Policy"].split("; ") for rule in POLICY)
    assert "'unsafe" not in response.headers["Content-Security-Policy"]
    async with server.http.head("/", headers=BROWSER) as response:
        assert (response.status, response.content_type) == (200, "text/html")
        assert response.content_length == len(page.encode()) and not await response.read()
    for accept in ("*/*", "application/json"):
        async with server.http.get("/", headers={"Accept": accept}) as response:
            assert (await response.json())["name"] == "loom" and response.headers["Vary"] == "Accept"


async def test_all_it_loads_is_relative_open_and_used(start: Start) -> None:
    """The page is behind a prefix, and is loaded without a key."""
    server = await start(ServeConfig(api_key=("secret",), root_path="/llm"))
    async with server.http.get("/llm/", headers=BROWSER) as response:
        page = await response.text()
    assert "/page/" not in page.replace('"page/', ""), "relative to where the page is"
    due, seen = re.findall(r'(?:src|href)="(page/[\w.]+)"', page), set()
    while due:
        if (path := due.pop()) in seen:
            continue
        seen.add(path)
        async with server.http.get("/llm/" + path) as response:
            text = await response.text()
        assert (response.status, response.content_type) == (200, MEDIA[path.rpartition(".")[2]])
        assert response.headers.items() >= SAFE.items()
        due += [f"page/{name}" for name in re.findall(r'^import .* from "\./([\w.]+)";$', text, re.M)]
    assert seen == {f"page/{name}" for name in FILES}
    for path in ("page/page.html", "page/routes.py", "page/..%2froutes.py", "page/"):
        async with server.http.get("/llm/" + path) as response:
            assert response.status == 404


def test_the_package_has_every_file() -> None:
    data = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["package-data"]
    patterns = data["app.api.page"]
    assert [path.name for path in SOURCES if not any(fnmatch(path.name, each) for each in patterns)] == []


def test_no_text_becomes_html_and_nothing_is_from_elsewhere() -> None:
    """Browsers refuse it too, by the policy; those without trusted types only by this."""
    unsafe = r"innerHTML|outerHTML|insertAdjacentHTML|setHTML|document\.write|\beval\b|Function\(|srcdoc"
    elsewhere = r"""["'(]\s*(?:https?:)?//(?!www\.w3\.org/2000/svg)"""
    inline = r"<script(?![^>]*\bsrc=)|<style|\bstyle=|\bon\w+="
    for path in SOURCES:
        text = path.read_text()
        found = re.findall(f"{unsafe}|{elsewhere}", text)
        if path.suffix == ".html":
            found += re.findall(inline, text)
        assert found == [], path.name
