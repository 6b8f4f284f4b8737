"""The files of `configs/deploy` are well-formed, and every command line in them is one that Loom accepts."""

from __future__ import annotations

import configparser
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import pytest
import yaml

from app.settings import COMMANDS, parse
from bench.chaos.tiny import ROOT
from core.config import Config
from core.env import VARIABLES

DEPLOY = ROOT / "configs/deploy"
DRAIN = Config().serve.drain_timeout


class Start(NamedTuple):
    """A command line, the variables beside it, and where it is expected to listen."""

    words: list[str]
    variables: Mapping[str, str]
    port: int
    host: str = "0.0.0.0"


def dockerfile(kind: str) -> dict[str, list[str]]:
    """Arguments of the instructions, by name; lines that end in a backslash are joined."""
    text = re.sub(r"^\s*#.*\n", "", (DEPLOY / f"Dockerfile.{kind}").read_text(), flags=re.MULTILINE)
    found: dict[str, list[str]] = {}
    for line in text.replace("\\\n", " ").splitlines():
        name, _, arguments = line.partition(" ")
        found.setdefault(name, []).append(arguments)
    return found


def image(kind: str, given: list[str] | None = None) -> list[str]:
    """Command that a container of the image runs."""
    instructions = dockerfile(kind)
    own = json.loads(instructions["CMD"][-1])
    return [*json.loads(instructions["ENTRYPOINT"][-1]), *(own if given is None else given)]


def environment(kind: str) -> dict[str, str]:
    lines = [word for line in dockerfile(kind)["ENV"] for word in shlex.split(line)]
    return dict(word.split("=", 1) for word in lines)


def compose() -> Any:
    return yaml.safe_load((DEPLOY / "compose.yaml").read_text())


def unit() -> configparser.SectionProxy:
    parser = configparser.RawConfigParser(strict=False)  # a unit may name a key twice
    parser.optionxform = str
    parser.read_string((DEPLOY / "loom.service").read_text())
    return parser["Service"]


def kubernetes() -> dict[str, Any]:
    documents = yaml.safe_load_all((DEPLOY / "kubernetes.yaml").read_text())
    return {each["kind"]: each for each in documents}


def pod() -> Any:
    return kubernetes()["Deployment"]["spec"]["template"]["spec"]


def starts() -> Iterator[tuple[str, Start]]:
    for kind in ("cpu", "cuda"):
        yield f"Dockerfile.{kind}", Start(image(kind), environment(kind), 8000)
        service = compose()["services"][kind]
        variables = environment(kind) | service["environment"]
        published = int(service["ports"][0].rpartition(":")[2])
        yield f"compose.yaml {kind}", Start(image(kind, service["command"]), variables, published)
    yield "loom.service", Start(shlex.split(unit()["ExecStart"]), {}, 8000, "127.0.0.1")
    (container,) = pod()["containers"]
    kind = container["image"].rpartition("-")[2]
    variables = environment(kind) | {each["name"]: "from the secret" for each in container["env"]}
    port = container["ports"][0]["containerPort"]
    yield "kubernetes.yaml", Start(image(kind, container["args"]), variables, port)


@pytest.mark.parametrize("start", [pytest.param(start, id=name) for name, start in starts()])
def test_a_command_line_is_accepted_and_serves_where_it_is_expected(
    start: Start, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    program, command, *words = start.words
    assert program.rpartition("/")[2] == "loom" and command in COMMANDS
    for name, value in start.variables.items():
        if name.startswith("LOOM_") and name not in VARIABLES:
            monkeypatch.setenv(name, value)
    config = parse(words)
    assert (config.serve.host, config.serve.port) == (start.host, start.port)
    assert config.serve.drain_timeout == DRAIN  # less than the times below
    assert capsys.readouterr().err == ""  # no note on a variable that sets nothing


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_an_image_is_pinned_and_does_not_run_as_root(kind: str) -> None:
    instructions = dockerfile(kind)
    for origin in instructions["FROM"]:
        assert re.fullmatch(r"[\w./]+:\d+\.\d+\.\d+-[\w.-]+( AS \w+)?", origin)
    (torch,) = (line for line in instructions["RUN"] if "torch" in line)
    assert re.search(r"torch==\d+\.\d+\.\d+$", torch)
    assert all("--no-cache-dir" in line for line in instructions["RUN"] if "pip install" in line)
    assert int(instructions["USER"][-1]) > 0
    for copied in instructions["COPY"]:
        if not copied.startswith("--from"):
            assert all((ROOT / source).exists() for source in copied.split()[:-1])
    assert "/health" in instructions["HEALTHCHECK"][0]


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_a_service_of_compose_builds_its_image_and_may_write_nowhere_else(kind: str) -> None:
    service = compose()["services"][kind]
    folder = (DEPLOY / service["build"]["context"]).resolve()
    assert folder == ROOT and (folder / service["build"]["dockerfile"]).samefile(
        DEPLOY / f"Dockerfile.{kind}"
    )
    assert service["image"] == f"loom:{_version()}-{kind}"
    assert service["read_only"] and service["tmpfs"] == ["/tmp"]
    assert service["volumes"] == ["home:/home/loom"] and "home" in compose()["volumes"]
    assert service["ports"] == ["127.0.0.1:8000:8000"]
    assert int(service["stop_grace_period"].removesuffix("s")) > DRAIN
    assert service["environment"]["LOOM_API_KEY"].startswith("${LOOM_API_KEY:?")  # no start without keys


def test_the_unit_drains_and_is_not_started_again_with_a_wrong_configuration() -> None:
    service = unit()
    assert int(service["TimeoutStopSec"]) > DRAIN and service["KillMode"] == "mixed"
    assert service["Restart"] == "on-failure" and service["RestartPreventExitStatus"] == "2"
    assert service["ProtectSystem"] == "strict" and service["DynamicUser"] == "yes"
    assert service["Environment"] == f"HOME=%S/{service['StateDirectory']}"


def test_kubernetes_probes_the_server_and_waits_until_it_has_drained() -> None:
    (container,) = pod()["containers"]
    for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
        assert container[probe]["httpGet"] == {"path": "/health", "port": "http"}
    startup = container["startupProbe"]
    assert startup["periodSeconds"] * startup["failureThreshold"] >= 1800
    stop = container["lifecycle"]["preStop"]["sleep"]["seconds"]
    assert pod()["terminationGracePeriodSeconds"] > stop + DRAIN


def test_kubernetes_sends_requests_to_the_pod_and_none_of_its_names_is_a_flag() -> None:
    deployment, service = kubernetes()["Deployment"], kubernetes()["Service"]
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == deployment["spec"]["selector"]["matchLabels"] == labels
    (container,) = pod()["containers"]
    assert service["spec"]["ports"][0]["targetPort"] == container["ports"][0]["name"]
    assert pod()["enableServiceLinks"] is False
    assert container["image"] == f"loom:{_version()}-cuda"


def test_kubernetes_gives_the_pod_no_rights_it_does_not_need() -> None:
    (container,) = pod()["containers"]
    assert pod()["securityContext"]["runAsUser"] == int(dockerfile("cuda")["USER"][-1])
    assert pod()["securityContext"]["runAsNonRoot"] and not pod()["automountServiceAccountToken"]
    rights = container["securityContext"]
    assert rights["readOnlyRootFilesystem"] and not rights["allowPrivilegeEscalation"]
    assert rights["capabilities"] == {"drop": ["ALL"]}
    mounted = {each["name"]: each["mountPath"] for each in container["volumeMounts"]}
    assert mounted == {"home": dockerfile("cuda")["WORKDIR"][-1], "tmp": "/tmp"}
    assert {each["name"] for each in pod()["volumes"]} == set(mounted)
    claim = kubernetes()["PersistentVolumeClaim"]["metadata"]["name"]
    assert pod()["volumes"][0]["persistentVolumeClaim"]["claimName"] == claim
    assert [each["name"] for each in container["env"] if "secretKeyRef" in each["valueFrom"]] == [
        "LOOM_API_KEY"
    ]


def _version() -> str:
    found = re.search(r'^version = "(.+)"', (ROOT / "pyproject.toml").read_text(), re.MULTILINE)
    assert found is not None
    return found[1]
