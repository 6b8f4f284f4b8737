"""`python -m bench.load` as a process, with its client processes."""

from __future__ import annotations

import asyncio
import json
import signal
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest
from aiohttp import web

from bench.load import main as command
from bench.load import server
from bench.load.client import Target
from bench.load.workloads import Workload
from tests.rigs.completions_server import Fake, serving
from tests.rigs.process import take_ctrl_c
from tests.rigs.wait import PATIENCE


async def start(*args: str) -> Process:
    return await asyncio.create_subprocess_exec(
        sys.executable, "-m", "bench.load", *args, stdout=PIPE, stderr=PIPE, preexec_fn=take_ctrl_c
    )


async def finish(process: Process) -> tuple[int | None, str, str]:
    out, err = await process.communicate()
    return process.returncode, out.decode(), err.decode()


async def test_two_scenarios_from_the_command_line_to_the_file(tmp_path: Path) -> None:
    fake = Fake()
    fake.refuse = lambda n: (429, "queue full") if n == 5 else None
    file = tmp_path / "out.json"
    async with serving(fake) as url:
        flags = (
            "--scenario",
            "c32,short512",
            "--scale",
            "0.03",
            "--processes",
            "2",
            "--output-len",
            "4",
            "--flush",
        )
        more = ("--goodput", "ttft:60000", "--output", str(file), "--label", "mine", "--api-key", "hush")
        code, out, err = await finish(await start("--url", url, *flags, *more))
    assert code == 0, err
    c32, short = json.loads(file.read_text())
    assert (c32["name"], c32["ok"] + c32["bad"]) == ("c32", 3)
    assert (short["name"], short["ok"] + short["bad"], fake.flushed) == ("short512", 61, 2)
    assert short["workload"]["concurrency"] == 15 and short["conditions"]["client_processes"] == 2
    assert c32["bad"] + short["bad"] == 1 and "1 x http 429: queue full" in out
    for name in ("out_tok_s", "tot_tok_s", "ttft_ms", "tpot_ms", "itl_ms", "goodput_req_s", "cached_share"):
        assert short[name] is not None
    assert short["events_per_token"] == 1.0
    written = file.read_text()
    assert "127.0.0.1" not in written and "hush" not in written and "/home" not in written
    assert short["conditions"]["server_info"] == {"version": "1", "model_path": "tiny", "tp": 1}
    assert out.splitlines()[-1].startswith("short512")


async def test_records_larger_than_a_pipe_buffer_arrive(tmp_path: Path) -> None:
    file = tmp_path / "out.json"
    async with serving(Fake()) as url:
        flags = ("--requests", "10", "--concurrency", "5", "--output-len", "6000", "--processes", "1")
        code, _, err = await finish(await start("--url", url, *flags, "--warmup", "0", "--output", str(file)))
    (result,) = json.loads(file.read_text())
    assert (code, result["ok"], result["out_tokens"], result["lost_processes"]) == (0, 10, 60_000, 0), err


async def test_ctrl_c_prints_what_was_measured() -> None:
    stuck = asyncio.Event()

    class Stuck(Fake):
        async def complete(self, request: web.Request) -> web.StreamResponse:
            if len(self.bodies) == 3:  # one warm-up, two measured
                stuck.set()
                await asyncio.Event().wait()
            return await super().complete(request)

    async with serving(Stuck()) as url:
        process = await start("--url", url, "--concurrency", "1", "--requests", "9", "--input-len", "4")
        await asyncio.wait_for(stuck.wait(), PATIENCE)  # a failure must not hang
        process.send_signal(signal.SIGINT)
        code, out, err = await finish(process)
    assert code == 130, err
    assert "2 ok, 0 bad" in out and "interrupted" in out


async def test_no_server_is_one_line_of_error_and_exit_status_2() -> None:
    async with serving(Fake()) as url:
        pass
    code, _, err = await finish(await start("--url", url))
    assert code == 2 and err.startswith("bench.load: ") and len(err.splitlines()) == 1


@pytest.mark.parametrize("flags", [["--scenario", "nope"], ["--endpoint", "chat", "--prompt-kind", "ids"]])
def test_a_wrong_command_is_exit_status_2(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--model", "m", *flags]) == 2
    assert capsys.readouterr().err.startswith("bench.load: ")


def test_flags_make_workloads(tmp_path: Path) -> None:
    def of(*flags: str) -> list[Workload]:
        return command.workloads(command.parser().parse_args(flags))

    again = of("--scenario", "c32,lat1,c32", "--seed", "7")
    assert [(each.name, each.seed) for each in again] == [("c32", 7), ("lat1", 7), ("c32", 8)]
    (chat,) = of("--endpoint", "chat", "--turns", "3")
    assert (chat.prompt_kind, chat.turns, chat.name) == ("text", 3, "custom")
    (own,) = of(
        "--workload", "mine", "--prefix-len", "64", "--prefix-groups", "4", "--no-ignore-eos", "--rate", "2"
    )
    assert (own.name, own.prefix_len, own.prefix_groups, own.ignore_eos, own.rate) == (
        "mine",
        64,
        4,
        False,
        2.0,
    )
    (one,) = of("--scenario", "lat1", "--vocab-low", "1", "--vocab-high", "500")
    assert (one.name, one.input_len, one.vocab_high) == ("lat1", 128, 500)
    assert len(of("--scenario", "table")) == 6
    (replay,) = of("--trace", "x.csv", "--scale", "0.5")
    assert replay.requests == 0


async def test_the_first_model_is_the_default() -> None:
    async with serving(Fake()) as url:
        assert await asyncio.to_thread(server.first_model, Target.of(url)) == "tiny"
