"""Commands between steps, on a real runner and its threads."""

from __future__ import annotations

import gc
import json
import shutil
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from core.command import Action, Command, CommandDone, Tag
from core.config import CacheConfig, ModelConfig, ScheduleConfig
from core.errors import EngineFailed
from core.plan import Chunk, NewSlot, PageWrites, StepPlan, StepResult
from core.types import NO_TOKENS
from gpu.build import build_executor, spec_of
from gpu.executor import LocalExecutor
from gpu.maintenance import Maintenance
from tests.rigs import tiny_model
from tests.rigs.arrays import ints
from tests.rigs.runner import GREEDY

PROMPT = ints(range(3, 13))


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_model.build("llama", tmp_path_factory.mktemp("llama")).path


def make_executor(path: Path) -> LocalExecutor:
    return build_executor(
        spec_of(path),
        path,
        ModelConfig(),
        CacheConfig(kv_tokens=512),
        ScheduleConfig(),
        lambda stage, share: None,
    )


@pytest.fixture
def executor(path: Path) -> LocalExecutor:
    made = make_executor(path)
    made.start(lambda: None)
    return made


def prefill(step: int) -> StepPlan:
    """The prompt in slot 1 on pages 1 and 2; yields its first token."""
    writes = PageWrites(ints([1, 1]), ints([0, 1]), ints([1, 2]))
    return StepPlan(
        step, NO_TOKENS, (Chunk(1, 0, PROMPT, True),), (NewSlot(1, GREEDY, PROMPT, NO_TOKENS, 0),), writes
    )


def play(executor: LocalExecutor, *work: StepPlan | Command) -> list[StepResult | CommandDone]:
    """Submit everything at once, close, and take what came."""
    for item in work:
        if isinstance(item, Command):
            executor.command(item)
        else:
            executor.submit(item)
    executor.close()
    answers = executor.results()
    assert all(isinstance(answer, StepResult | CommandDone) for answer in answers), answers
    return answers  # type: ignore[return-value]


def command(id: int, action: Action, path: str = "", *tags: Tag) -> Command:
    return (
        Command(id=id, action=action, path=path, tags=tags)
        if tags
        else Command(id=id, action=action, path=path)
    )


def token(answer: StepResult | CommandDone) -> int:
    assert isinstance(answer, StepResult)
    return int(answer.tokens[0])


def test_answers_come_in_the_order_of_work_and_memory_comes_back(executor: LocalExecutor) -> None:
    first, slept, woke, second = play(
        executor, prefill(0), command(7, "sleep"), command(8, "wake"), prefill(1)
    )
    assert (slept, woke) == (CommandDone(7), CommandDone(8))
    assert token(first) == token(second)


@pytest.mark.parametrize("variant", ["llama", "qwen3-moe", "gpt2"])
def test_weights_that_sleep_are_freed(variant: str, tmp_path: Path) -> None:
    """Weights of a model in cycles are freed too, as `transformers` builds some, which the server has
    frozen."""
    path = tiny_model.build(variant, tmp_path).path
    answered = threading.Event()
    executor = make_executor(path)
    executor.start(answered.set)
    try:
        model = weakref.ref(executor._workers[0]._runner._model)
        gc.freeze()
        executor.command(command(1, "sleep"))
        assert answered.wait(60)
        assert executor.results() == [CommandDone(1)]
        assert model() is None
    finally:
        gc.unfreeze()
        executor.close()


def test_other_weights_of_the_same_shape_change_the_answer(executor: LocalExecutor, path: Path) -> None:
    other = path.parent / "other"
    other.mkdir(exist_ok=True)
    for file in path.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    reference = tiny_model.build("llama", path).reference
    with_zero = {name: tensor.clone().zero_() for name, tensor in reference.state_dict().items()}
    reference.save_pretrained(other, state_dict=with_zero)
    before, loaded, after = play(executor, prefill(0), command(1, "load_weights", str(other)), prefill(1))
    assert loaded == CommandDone(1)
    assert token(before) != 0
    assert token(after) == 0  # all logits are equal: the lowest id


@pytest.mark.parametrize("missing", ["nowhere", "shape"])
def test_what_does_not_fit_is_refused_and_the_old_weights_stay(
    executor: LocalExecutor, path: Path, missing: str, tmp_path: Path
) -> None:
    if missing == "shape":
        config = json.loads((path / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, "intermediate_size": 32}))
    before, refused, after = play(executor, prefill(0), command(1, "load_weights", str(tmp_path)), prefill(1))
    assert isinstance(refused, CommandDone)
    assert refused.error is not None and "config.json" in refused.error
    assert token(before) == token(after)


def damage(path: Path, how: str) -> Path:
    """Damage a copy of the checkpoint at `path`; returns what to load."""
    file = path / "model.safetensors"
    tensors = load_file(file)
    match how:
        case "header":
            file.write_bytes(file.read_bytes().replace(b'"dtype"', b'"dtipe"', 1))
        case "missing":
            del tensors["model.norm.weight"]
            save_file(tensors, file)
        case "scaled norm":
            tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)
            save_file({**tensors, "model.norm.weight_scale": torch.ones(1)}, file)
        case "gguf":
            file = path / "model.gguf"  # its one fact is an array of strings, the first of 2^64 - 1 bytes
            file.write_bytes(struct.pack("<4sIQQQcIIQQ", b"GGUF", 3, 0, 1, 1, b"a", 9, 8, 2, 2**64 - 1))
            return file
    return path


@pytest.mark.parametrize(
    ("how", "reason"),
    [
        ("header", "not a safetensors file"),
        ("missing", "1 tensors missing: model.norm.weight"),
        ("scaled norm", "is damaged: ValueError"),
        ("gguf", "is truncated or not a GGUF file"),
    ],
)
def test_damaged_weights_are_refused_and_the_old_ones_serve(
    executor: LocalExecutor, path: Path, how: str, reason: str, tmp_path: Path
) -> None:
    other = damage(Path(shutil.copytree(path, tmp_path / "other")), how)
    before, refused, after = play(executor, prefill(0), command(1, "load_weights", str(other)), prefill(1))
    assert isinstance(refused, CommandDone)
    assert refused.error is not None and reason in refused.error and str(other) in refused.error
    assert token(before) == token(after)


def test_a_trace_is_written(executor: LocalExecutor, tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    answers = play(
        executor,
        command(1, "profile_start"),
        prefill(0),
        command(2, "profile_stop", str(file)),
        command(3, "profile_stop", str(file)),
    )
    assert [a for a in answers if isinstance(a, CommandDone)][:2] == [CommandDone(1), CommandDone(2)]
    assert isinstance(answers[3], CommandDone) and answers[3].error is not None
    assert any("linear" in event.get("name", "") for event in json.loads(file.read_text())["traceEvents"])


def test_a_trace_that_cannot_be_written_is_refused(executor: LocalExecutor, tmp_path: Path) -> None:
    file = str(tmp_path / "gone" / "trace.json")
    started, _, stopped, again = play(
        executor,
        command(1, "profile_start"),
        prefill(0),
        command(2, "profile_stop", file),
        command(3, "profile_start"),
    )
    assert started == CommandDone(1) and again == CommandDone(3)
    assert isinstance(stopped, CommandDone) and stopped.error is not None
    assert f"{file} could not be written" in stopped.error


class Bare:
    """A runner that only remembers its model and its pages; `refuses` says what it cannot run with."""

    def __init__(self, refuses: tuple[object, ...] = ()) -> None:
        self.model: object = "old"
        self.pool: object = "pool"
        self.refuses = refuses

    def use_model(self, model: object) -> None:
        self.model = model

    def use_pool(self, pool: object) -> None:
        self.pool = pool

    def prepare(self) -> None:
        if self.model in self.refuses or self.pool in self.refuses:
            raise RuntimeError("out of memory")


@pytest.mark.parametrize("error", [OSError, KeyError, MemoryError])
@pytest.mark.parametrize("old_is_readable", [True, False])
def test_weights_that_cannot_be_restored_fail_the_engine(
    old_is_readable: bool, error: type[Exception]
) -> None:
    """Without room for two models a refused one has cost the old one already."""

    def load(path: str) -> Any:
        if path == "old" and old_is_readable:
            return "old again"
        raise error(f"no such directory: {path}")

    maintenance, runner = Maintenance("old", load, lambda: None, both=False), Bare()  # type: ignore[arg-type, return-value]
    if old_is_readable:
        done = maintenance.carry_out(command(1, "load_weights", "new"), runner)
        assert done.error is not None and "no such directory: new" in done.error
        assert runner.model == "old again"
    else:
        with pytest.raises(EngineFailed, match=r"new.*old"):
            maintenance.carry_out(command(1, "load_weights", "new"), runner)


@pytest.mark.parametrize("both", [True, False])
@pytest.mark.parametrize("old_runs", [True, False])
def test_weights_whose_steps_cannot_be_captured_are_refused(both: bool, old_runs: bool) -> None:
    """They were read, and took the old ones' place: those are read again, or the engine fails."""
    runner = Bare(("new",) if old_runs else ("new", "old again"))
    maintenance = Maintenance(
        "old",
        lambda path: "new" if path == "new" else "old again",  # type: ignore[arg-type, return-value]
        lambda: None,  # type: ignore[arg-type, return-value]
        both=both,
    )
    if old_runs:
        done = maintenance.carry_out(command(1, "load_weights", "new"), runner)
        assert (done.error, runner.model) == ("out of memory", "old again")
    else:
        with pytest.raises(EngineFailed, match="could not be read again"):
            maintenance.carry_out(command(1, "load_weights", "new"), runner)


@pytest.mark.parametrize("refused", ["weights", "pages"])
def test_a_wake_that_fails_half_way_leaves_the_server_asleep(refused: str) -> None:
    runner = Bare((refused,))
    maintenance = Maintenance("old", lambda path: "weights", lambda: "pages")  # type: ignore[arg-type, return-value]
    tags: tuple[Tag, ...] = ("weights", "kv_cache")
    assert maintenance.carry_out(command(1, "sleep", "", *tags), runner).error is None
    done = maintenance.carry_out(command(2, "wake", "", *tags), runner)
    assert (done.error, runner.model, runner.pool) == ("out of memory", None, None)
    runner.refuses = ()
    assert maintenance.carry_out(command(3, "wake", "", *tags), runner).error is None
    assert (runner.model, runner.pool) == ("weights", "pages")
