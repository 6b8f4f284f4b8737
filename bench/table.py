"""Starts a server, runs the six scenarios against it, stops it.

    python -m bench.table --model configs/models/qwen3-30b-a3b --name h200-qwen3-30b-a3b \\
        --note "what changed, and its predicted effect" [--scenario c32] [flags of the server]

Runs `python -m app` with random weights on a free port. Writes bench/results/NAME.json, and a dated copy with
the note under bench/results/history/. Time from start to ready and to the first token is measured too.

Bias: client and server share the host's cores; the peers' figures were taken the same way.
"""

from __future__ import annotations

import json
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from bench.flags import command
from bench.load.main import main as load
from bench.results import RESULTS, conditions
from bench.servers import SERVER, Server


def main() -> None:
    """Measure and write the results."""
    parser = command(__doc__)
    parser.add_argument("--model", required=True, help="directory with a config.json")
    parser.add_argument("--name", required=True, help="of the file under bench/results")
    parser.add_argument("--note", default="", help="what changed, and its predicted effect")
    parser.add_argument("--scenario", default="table,chat256", help="as for bench.load")
    parser.add_argument("--scale", default="1", help="as for bench.load: 2 for two replicas")
    parser.add_argument("--requests", help="as for bench.load: instead of the scenario's, before --scale")
    parser.add_argument(
        "--timeout", type=float, default=300, help="seconds to wait until the server is ready"
    )
    parser.add_argument("--out", type=Path, default=RESULTS, help="directory of the results")
    args, flags = parser.parse_known_args()
    history = args.out / "history"
    history.mkdir(parents=True, exist_ok=True)
    stamp = datetime.now(UTC).strftime("%Y%m%d-%H%M%S")
    raw = history / f"{args.name}-{stamp}.json"
    server = Server(["--model", args.model, *SERVER, *flags], raw.with_suffix(".log"))
    try:
        ready, first = server.wait_ready(args.timeout), server.first_token()
        print(f"ready after {ready:.1f} s, first token after {first:.1f} s", flush=True)
        run = ["--url", server.url, "--scenario", args.scenario, "--scale", args.scale]
        more = ["--requests", args.requests] if args.requests else []
        status = load([*run, *more, "--output", str(raw)])
    finally:
        server.stop()
    if status:
        sys.exit(status)
    results: list[dict[str, Any]] = json.loads(raw.read_text())
    about = {
        "note": args.note,
        "server_flags": flags,
        "start_to_ready_s": round(ready, 2),
        "start_to_first_token_s": round(first, 2),
        **conditions(),
    }
    for result in results:
        result["conditions"] = result.get("conditions", {}) | about
    text = json.dumps(results, indent=1) + "\n"
    raw.write_text(text)
    (args.out / f"{args.name}.json").write_text(text)


if __name__ == "__main__":
    main()
