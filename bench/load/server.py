"""Calls besides the load: model name, server info, cache flush."""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.request

from bench.load.client import Target

_PRIVATE = re.compile(r"key|secret|password|admin|host|addr|url|_ip$|^ip$", re.IGNORECASE)
_DEPTH = 3


def first_model(target: Target) -> str:
    """Id of the first served model. ConnectionError or ValueError when there is none."""
    try:
        found = json.loads(_call(target, "/v1/models"))
        return str(found["data"][0]["id"])
    except (KeyError, IndexError, TypeError, json.JSONDecodeError) as error:
        raise ValueError(f"{target.url}/v1/models lists no model: set --model") from error


def info(target: Target) -> object:
    """`/server_info` without secrets, hosts and paths; None when it fails."""
    try:
        return public(json.loads(_call(target, "/server_info")))
    except (ConnectionError, ValueError):
        return None


def flush(target: Target) -> bool:
    """Flush the prefix cache; False when the server does not support it."""
    try:
        _call(target, "/flush_cache", post=True)
    except ConnectionError:
        return False
    return True


def public(value: object, depth: int = _DEPTH) -> object:
    """A copy for a results file: without hosts and secrets, paths cut to their last part, limited depth."""
    if isinstance(value, dict):
        if depth == 0:
            return None
        return {k: public(v, depth - 1) for k, v in value.items() if not _PRIVATE.search(str(k))}
    if isinstance(value, list):
        return [public(one, depth - 1) for one in value[:16]] if depth else None
    if isinstance(value, str):
        return base_name(value)[:200]
    return value


def base_name(text: str) -> str:
    """The last part of an absolute path; other text unchanged."""
    return text.rstrip("/").rpartition("/")[2] if text.startswith(("/", "~")) else text


def _call(target: Target, path: str, post: bool = False) -> bytes:
    request = urllib.request.Request(target.url + path, data=b"{}" if post else None)
    request.add_header("Content-Type", "application/json")
    if target.api_key:
        request.add_header("Authorization", f"Bearer {target.api_key}")
    try:
        with urllib.request.urlopen(request, timeout=min(target.timeout, 30)) as answer:
            return bytes(answer.read())
    except (urllib.error.URLError, OSError, http.client.HTTPException) as error:
        raise ConnectionError(f"{target.url}{path}: {error}") from error
