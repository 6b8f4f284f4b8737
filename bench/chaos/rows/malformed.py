"""Malformed and expensive requests, over every route of `/openapi.json`."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import quote

from bench.chaos.bench import Bench
from bench.chaos.bodies import BODIES, VALUES, mutated
from bench.chaos.clients import REQUEST_TIMEOUT, TEXT, ask, post
from bench.chaos.row import Outcome
from bench.chaos.server import POLL_INTERVAL, TIMEOUT

CONCURRENCY = 2
"""Every second request reaches the model; with four at a time the attacker's own load on two cores raises the
neighbour's p99 gap to 19 to 22 ms."""
IDS = ("unknown", "..%2f..%2fetc%2fpasswd", "%00", "%ff%fe", "a" * 300, "-1", "'; DROP TABLE files; --")
LOOP_BYTES = 64 * 1024
"""Largest JSON that the server's process may decode in one call."""
LOOP_ENCODED = 128 * 1024
"""Largest JSON that its event loop may encode in one call: 64 positions with 20 alternatives each are 92
KB."""


async def malformed(bench: Bench) -> Outcome:
    """No response is a 5xx, every error has the format of its dialect, and every request is answered."""
    outcome, statuses = Outcome(), Counter[int]()
    openapi = (await ask(bench.port, "GET", "/openapi.json")).json
    routes = [
        (method.upper(), path, operation)
        for path, item in openapi["paths"].items()
        for method, operation in item.items()
        if method in ("get", "post", "delete")
    ]
    count = bench.count(10_000, 2 * len(routes))
    gate = asyncio.Semaphore(CONCURRENCY)

    async def one(index: int) -> None:
        method, path, operation = routes[index % len(routes)]
        sent = _body(bench, openapi, path, operation) if method == "POST" else None
        target = re.sub(r"\{[^}]*\}", lambda _: quote(bench.rng.choice(IDS), safe="%"), path)
        if method == "GET" and bench.rng.random() < 0.5:
            target += "?" + "&".join(
                f"{p['name']}={quote(str(bench.rng.choice(VALUES)).encode('utf-8', 'replace')[:200])}"
                for p in operation.get("parameters", ())
                if p["in"] == "query"
            )
        async with gate:
            try:
                async with asyncio.timeout(TIMEOUT):
                    answer = await ask(bench.port, method, target, sent, {"Content-Type": "application/json"})
            except TimeoutError:
                outcome.violations.append(f"{method} {target}: no answer to {sent!r}"[:500])
                return
        statuses[answer.status] += 1
        if not 200 <= answer.status < 500 or b'"server_error"' in answer.body:
            outcome.violations.append(
                f"{method} {target}: {answer.status} {answer.body[-200:]!r} to {sent!r}"[:700]
            )
        elif answer.status >= 400 and not _is_error(answer.body):
            outcome.violations.append(
                f"{method} {target}: {answer.status} without an error body: {answer.body[:200]!r}"
            )

    async def attack() -> None:
        await asyncio.gather(*(one(index) for index in range(count)))

    await bench.run_beside_neighbour(outcome, attack())
    outcome.figures |= {"requests": count, "routes": len(routes), "statuses": dict(sorted(statuses.items()))}
    outcome.expect(statuses[200] > 0 and statuses[400] > 0, "the bodies are all valid, or all invalid")
    return outcome


def _body(bench: Bench, openapi: dict[str, Any], path: str, operation: dict[str, Any]) -> bytes:
    """A body for the route with invalid values in it, without `abort_all`, which would abort the
    neighbour."""
    content = operation.get("requestBody", {}).get("content", {})
    body = BODIES.get(path) or next((each.get("example") for each in content.values()), None) or {}
    body = dict(body) if isinstance(body, dict) else {}
    fields = _fields(openapi, operation)
    for name in bench.rng.sample(fields, k=min(2, len(fields))):
        body.setdefault(name, bench.rng.choice(VALUES))
    data = mutated(body, bench.rng)
    return data.replace(b'"abort_all": ', b'"abort_none": ')


def _fields(openapi: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """Field names that a body of the route may have."""
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(operation.get("requestBody", {}))))
    schemas = [openapi["components"]["schemas"][name] for name in named]
    return sorted({name for schema in schemas for name in schema.get("properties", ())})


def _is_error(body: bytes) -> bool:
    """Whether `body` is an error body of OpenAI, Anthropic, Cohere or Ollama: an object with a message."""
    try:
        error = json.loads(body)
    except ValueError:
        return False
    return isinstance(error, dict) and bool(error.get("error") or error.get("message"))


async def costly(bench: Bench) -> Outcome:
    """Requests that are slow to decode, validate or answer are handled off the event loop or in slices, or
    rejected."""
    outcome, size = Outcome(), bench.count(8 * 2**20, 2**18) - 4096
    await bench.server.call("reset_sizes")

    async def attack() -> None:
        for name, (path, body) in _costly(size).items():
            answer = await post(bench.port, path, body)
            code = answer.status
            outcome.expect(400 <= code < 500 or code == 200, f"{name}: {code} {answer.body[:200]!r}")

        outcome.expect((status := await _batch(bench.port, size)) == "completed", f"a batch line: {status}")

    await bench.run_beside_neighbour(outcome, attack())
    accounting = await bench.server.call("accounting")
    largest, encoded = accounting["decoded"], accounting["encoded"]
    outcome.figures |= {"body_bytes": size, "largest_decoded": largest, "largest_encoded_on_loop": encoded}
    outcome.expect(largest <= LOOP_BYTES, f"{largest} bytes were decoded in one call in the server's process")
    outcome.expect(encoded <= LOOP_ENCODED, f"{encoded} bytes were encoded in one call on the event loop")
    return outcome


async def _batch(port: int, size: int) -> str:
    """Final status of a batch with one line of about `size` bytes."""
    line = {"custom_id": "a", "method": "POST", "url": TEXT, "body": {"prompt": "a" * size}}
    parts = [
        b'Content-Disposition: form-data; name="purpose"\r\n\r\nbatch',
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + json.dumps(line).encode(),
    ]
    form = b"".join(b"--loom\r\n%b\r\n" % part for part in parts) + b"--loom--\r\n"
    headers = {"Content-Type": "multipart/form-data; boundary=loom"}
    sent = await ask(port, "POST", "/v1/files", form, headers)
    if sent.status != 200:
        return f"{sent.status} {sent.body[:200]!r}"
    body = {"input_file_id": sent.json["id"], "endpoint": TEXT, "completion_window": "24h"}
    batch = (await post(port, "/v1/batches", body)).json
    async with asyncio.timeout(REQUEST_TIMEOUT):
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(POLL_INTERVAL)
            batch = (await ask(port, "GET", f"/v1/batches/{batch['id']}")).json
    return str(batch["status"])


def _costly(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of about `size` bytes, each of which once blocked the event loop."""

    def filled(head: str, item: str, tail: str) -> bytes:
        return (head + item * ((size - len(head) - len(tail)) // len(item)) + tail).encode()

    def scored(**fields: object) -> bytes:
        return json.dumps({"prompt": [5 + i % 200 for i in range(1_500)], "max_tokens": 1, **fields}).encode()

    biases = ",".join(f'"{i}":1' for i in range(size // 11))
    return {
        "subnormal numbers": (TEXT, filled('{"x":[', "4.9e-324,", '1],"prompt":"a"}')),
        "long numbers": (TEXT, filled('{"prompt":[', "1" * 400 + ",", "1]}")),
        "small values": (TEXT, filled('{"prompt":"a","x":[', "[],", "1]}")),
        "token ids": (TEXT, filled('{"prompt":[', "1,", "1]}")),
        "depth": (TEXT, b"[" * size),
        "escapes": (TEXT, filled('{"max_tokens":1,"prompt":"', "\\u00e9", '"}')),
        "biases": (TEXT, ('{"prompt":"a","logit_bias":{' + biases + "}}").encode()),
        "a long id": ("/abort_request", filled('{"rid":"', "a", '"}')),
        "one text": (TEXT, filled('{"max_tokens":1,"prompt":"', "a", '"}')),
        "prompt log-probabilities": (TEXT, scored(prompt_logprobs=20)),
        "echoed log-probabilities": (TEXT, scored(echo=True, logprobs=20)),
        "equal keys": (TEXT, filled("{", '"prompt":"a",', '"prompt":"b","max_tokens":1}')),
    }
