"""Requests that are wrong in every way, over every route that the server describes."""

from __future__ import annotations

import asyncio
import json
import re
from collections import Counter
from typing import Any
from urllib.parse import quote

from bench.chaos.bench import Bench
from bench.chaos.bodies import BODIES, VALUES, mutated
from bench.chaos.clients import HANG, TEXT, ask, post
from bench.chaos.row import Found
from bench.chaos.server import LOOK, PATIENCE

AT_ONCE = 2
"""Every second one of them reaches the model; with four the attacker's own work on two cores puts a
neighbour's p99 gap at 19 to 22 ms, which says nothing of the server."""
IDS = ("nobody", "..%2f..%2fetc%2fpasswd", "%00", "%ff%fe", "a" * 300, "-1", "'; DROP TABLE files; --")
LOOP_BYTES = 64 * 1024
"""JSON that is larger than this is never decoded at once in the server's process."""
LOOP_ENCODED = 128 * 1024
"""Nor larger than this encoded at once on its loop: 64 positions with 20 alternatives each are 92 KB."""


async def malformed(bench: Bench) -> Found:
    """No response is a 5xx, every error has its dialect's shape, and every request is answered."""
    found, statuses = Found(), Counter[int]()
    told = (await ask(bench.port, "GET", "/openapi.json")).json
    routes = [
        (method.upper(), path, operation)
        for path, item in told["paths"].items()
        for method, operation in item.items()
        if method in ("get", "post", "delete")
    ]
    count = bench.count(10_000, 2 * len(routes))
    gate = asyncio.Semaphore(AT_ONCE)

    async def one(index: int) -> None:
        method, path, operation = routes[index % len(routes)]
        sent = _body(bench, told, path, operation) if method == "POST" else None
        target = re.sub(r"\{[^}]*\}", lambda _: quote(bench.rng.choice(IDS), safe="%"), path)
        if method == "GET" and bench.rng.random() < 0.5:
            target += "?" + "&".join(
                f"{p['name']}={quote(str(bench.rng.choice(VALUES)).encode('utf-8', 'replace')[:200])}"
                for p in operation.get("parameters", ())
                if p["in"] == "query"
            )
        async with gate:
            try:
                async with asyncio.timeout(PATIENCE):
                    answer = await ask(bench.port, method, target, sent, {"Content-Type": "application/json"})
            except TimeoutError:
                found.wrong.append(f"{method} {target}: no answer to {sent!r}"[:500])
                return
        statuses[answer.status] += 1
        if not 200 <= answer.status < 500 or b'"server_error"' in answer.body:
            found.wrong.append(f"{method} {target}: {answer.status} {answer.body[-200:]!r} to {sent!r}"[:700])
        elif answer.status >= 400 and not _is_error(answer.body):
            found.wrong.append(
                f"{method} {target}: {answer.status} without an error body: {answer.body[:200]!r}"
            )

    async def attack() -> None:
        await asyncio.gather(*(one(index) for index in range(count)))

    await bench.beside(found, attack())
    found.figures |= {"requests": count, "routes": len(routes), "statuses": dict(sorted(statuses.items()))}
    found.expect(statuses[200] > 0 and statuses[400] > 0, "the bodies are all good, or all bad")
    return found


def _body(bench: Bench, told: dict[str, Any], path: str, operation: dict[str, Any]) -> bytes:
    """A body of the route with values of no sense in it. Nobody else is to be aborted by it."""
    content = operation.get("requestBody", {}).get("content", {})
    body = BODIES.get(path) or next((each.get("example") for each in content.values()), None) or {}
    body = dict(body) if isinstance(body, dict) else {}
    fields = _fields(told, operation)
    for name in bench.rng.sample(fields, k=min(2, len(fields))):
        body.setdefault(name, bench.rng.choice(VALUES))
    data = mutated(body, bench.rng)
    return data.replace(b'"abort_all": ', b'"abort_none": ')


def _fields(told: dict[str, Any], operation: dict[str, Any]) -> list[str]:
    """What a body of the route may name."""
    named = set(re.findall(r"#/components/schemas/(\w+)", json.dumps(operation.get("requestBody", {}))))
    schemas = [told["components"]["schemas"][name] for name in named]
    return sorted({name for schema in schemas for name in schema.get("properties", ())})


def _is_error(body: bytes) -> bool:
    """Whether it is an error body of OpenAI, Anthropic, Cohere or Ollama: an object with a message."""
    try:
        told = json.loads(body)
    except ValueError:
        return False
    return isinstance(told, dict) and bool(told.get("error") or told.get("message"))


async def costly(bench: Bench) -> Found:
    """What takes long to decode, to walk or to tell is done elsewhere or in slices, or refused."""
    found, size = Found(), bench.count(8 * 2**20, 2**20) - 4096
    await bench.server.tell("forget")

    async def attack() -> None:
        for name, (path, body) in _costly(size).items():
            answer = await post(bench.port, path, body)
            status = answer.status
            found.expect(400 <= status < 500 or status == 200, f"{name}: {status} {answer.body[:200]!r}")

        found.expect((told := await _batch(bench.port, size)) == "completed", f"a batch line: {told}")

    await bench.beside(found, attack())
    books = await bench.server.tell("books")
    largest, encoded = books["decoded"], books["encoded"]
    found.figures |= {"body_bytes": size, "largest_decoded": largest, "largest_encoded_on_loop": encoded}
    found.expect(largest <= LOOP_BYTES, f"{largest} bytes were decoded at once in the server's process")
    found.expect(encoded <= LOOP_ENCODED, f"{encoded} bytes were encoded on the loop at once")
    return found


async def _batch(port: int, size: int) -> str:
    """How a batch of one line of about `size` bytes ends."""
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
    async with asyncio.timeout(HANG):
        while batch["status"] not in ("completed", "failed", "expired"):
            await asyncio.sleep(LOOK)
            batch = (await ask(port, "GET", f"/v1/batches/{batch['id']}")).json
    return str(batch["status"])


def _costly(size: int) -> dict[str, tuple[str, bytes]]:
    """Bodies of about `size` bytes, each of which held a loop for long."""

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
