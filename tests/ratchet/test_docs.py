"""Guides: what they link to and name exists, and their commands are accepted."""

from __future__ import annotations

import re
import shlex
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from app import settings
from app.flags import Parser
from tests.rigs import tree

README_LINES = 150
OURS = r"(?:app|core|gpu|bench|tests|configs|\.ci)"
OTHERS = {"--index-url", "--nproc-per-node", "--pid"}
"""Flags of other programs."""
PROGRAM = re.compile(r"^(?:sudo )?(?:loom|python -m app|torchrun .* -m app|docker run .* loom:\S+)(?= |$)")


def guides() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=tree.ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.split()
    return [tree.ROOT / name for name in listed if (tree.ROOT / name).exists()]


each_guide = pytest.mark.parametrize("guide", guides(), ids=tree.name)


def blocks(guide: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", guide.read_text(), re.MULTILINE | re.DOTALL)


def anchor(heading: str) -> str:
    """Anchor of a heading, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def commands(guide: Path) -> Iterator[list[str]]:
    """Words after the program's name, of each command line in a block of shell."""
    for block in blocks(guide, "bash"):
        for line in block.replace("\\\n", " ").splitlines():
            for part in re.split(r"&&|\|", line):
                if found := PROGRAM.match(" ".join(part.split())):
                    yield shlex.split(" ".join(part.split())[found.end() :], comments=True)


def parser_of(words: list[str]) -> tuple[Parser, list[str]]:
    if words and words[0] in settings.COMMANDS:
        return settings.make_parser(words[0]), words[1:]
    return settings.make_parser(), words


def test_the_readme_is_short() -> None:
    assert len((tree.ROOT / "README.md").read_text().splitlines()) <= README_LINES


@each_guide
def test_links_lead_somewhere(guide: Path) -> None:
    text = re.sub(r"^```.*?^```", "", guide.read_text(), flags=re.MULTILINE | re.DOTALL)
    dead = []
    for target in re.findall(r"\]\(([^)]+)\)", text):
        if re.match(r"https?://", target):
            continue
        path, _, heading = target.partition("#")
        file = (guide.parent / path).resolve() if path else guide
        known = re.findall(r"^#+ (.+)$", file.read_text(), re.MULTILINE) if heading and file.exists() else []
        if not file.exists() or (heading and heading not in map(anchor, known)):
            dead.append(target)
    assert dead == []


@each_guide
def test_named_files_and_modules_exist(guide: Path) -> None:
    text = guide.read_text()
    named = re.findall(rf"`({OURS}/[\w./-]*\w/?)(?:::\w+)?`", text)
    for block in blocks(guide, "text"):
        named += re.findall(rf"(?:^|[ ;])({OURS}/[\w./-]*\w)", block, re.MULTILINE)
    modules = [module.rstrip(".") for module in re.findall(r"python\s+-m\s+(bench[\w.]*)", text)]
    named += [
        file if (tree.ROOT / file).exists() else module.replace(".", "/") + "/__main__.py"
        for module in modules
        for file in [module.replace(".", "/") + ".py"]
    ]
    assert [name for name in named if not (tree.ROOT / name).exists()] == []


@each_guide
def test_named_flags_and_metrics_exist(guide: Path) -> None:
    known = set().union(*(parser_of([command])[0].names for command in settings.COMMANDS))
    sources = "".join(path.read_text() for room in ("app", "bench") for path in tree.files(room))
    inline = re.sub(r"^```.*?^```", "", guide.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = {
        word
        for code in re.findall(r"`([^`]+)`", inline)
        for word in re.findall(r"(?<!\S)--[a-z][a-z.-]*", code)
    }
    missing = [flag for flag in named - known - OTHERS if f'"{flag}"' not in sources]
    missing += [
        metric
        for metric in re.findall(r"`(loom_[a-z_]+)`", inline)
        if not re.search(rf'"{metric}"|"{metric.removeprefix("loom_")}"', sources)
    ]
    assert missing == []


@each_guide
def test_commands_are_accepted(guide: Path) -> None:
    for words in commands(guide):
        parser, flags = parser_of(words)
        parser.read(flags)  # exits for a flag that does not exist


def test_commands_are_found() -> None:
    """The search finds commands of every form: if it found none, the test above would pass anyway."""
    found = {tree.name(guide): list(commands(guide)) for guide in guides()}
    assert len(found["README.md"]) >= 6
    assert found["configs/deploy/README.md"][0] == ["serve", "Qwen/Qwen3-8B"]
    assert ["--model", "org/name", "--tp", "2"] in found["gpu/nodes/README.md"]
