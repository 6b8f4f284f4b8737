"""The page at `/` and its files, for browsers. Other clients that ask for `/` get JSON."""

from __future__ import annotations

from pathlib import Path

from aiohttp import web

from app.api.request.routing import Routes
from app.http.reply import json_response
from core.errors import NotFound

ROUTES = Routes()

MEDIA = {".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
FOLDER = Path(__file__).parent
INDEX = (FOLDER / "page.html").read_bytes()
FILES = {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in MEDIA}
"""The files that the page loads, 40 kB. Read at import: the event loop waits for no disk."""

HEADERS = {
    # The page loads its own files only and runs no inline script: a model's answer may contain HTML.
    "Content-Security-Policy": (
        "default-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'; "
        "require-trusted-types-for 'script'; trusted-types 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-cache",  # after an update no script of another version runs
}
VARIES = {"Vary": "Accept"}


@ROUTES.add("GET /", "HEAD /", has="name health openapi", media="text/html")
async def root(request: web.Request) -> object:
    """The page for browsers; for others the server's name and where it describes itself. Claude Code and
    Ollama clients look here first, to see whether there is a server."""
    if "text/html" in request.headers.get("Accept", ""):
        return _file(INDEX, "text/html", VARIES)
    response = json_response({"name": "loom", "health": "/health", "openapi": "/openapi.json"})
    response.headers.update(VARIES)
    return response


@ROUTES.add("GET /page/{id}", media="*/*")
async def file(request: web.Request) -> object:
    """A file of the page at `/`, by name."""
    name = request.match_info["id"]
    if name not in FILES:
        raise NotFound(f"The page has no file '{name[:200]}'.", "id", "file_not_found")
    return _file(FILES[name], MEDIA[Path(name).suffix])


def _file(body: bytes, media: str, headers: dict[str, str] | None = None) -> web.Response:
    response = web.Response(body=body, content_type=media, charset="utf-8")
    response.headers.update(HEADERS | (headers or {}))
    return response
