"""Resolves `--model` to files on disk: weights, config, tokenizer, defaults."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from app.checkpoint.convert import SLOW, from_gguf, from_slow
from app.checkpoint.fetch import DEFAULT, NotFetched, Progress, default_model
from core.config import ModelConfig
from core.env import read, read_object
from core.errors import ConfigError, ModelError, RequestError
from core.models import PoolingSpec, read_spec
from core.models.fields import Config, Fields
from core.models.gguf import gguf_parts, gguf_stem
from core.request import SamplingParams
from core.request.params import check

log = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
ADAPTER = "adapter_config.json"
_HUB_CONFIG = ["config.json", "modules.json"]
_HUB_WEIGHTS = "*.safetensors"
_HUB_FILES = ["*.json", _HUB_WEIGHTS, "*.txt", "*.model", "*.jinja"]
"""Files that are fetched from the hub: never pickles and never Python."""

PACKAGE_ROOT = Path(__file__).resolve().parents[2]
"""Holds `configs/models/NAME`, also where the package is installed."""

_SAMPLING = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")
"""Fields of generation_config.json that become defaults of requests, as in vLLM and SGLang."""


class Checkpoint(msgspec.Struct, frozen=True, kw_only=True):
    """A model's files and configuration, before a weight is read."""

    names: tuple[str, ...]
    """Names that clients may use; answers carry the first."""
    path: Path
    """Directory with the weights, or the .gguf file."""
    config: dict[str, Any]
    """config.json; made from the metadata for a .gguf file."""
    eos_ids: tuple[int, ...]
    """From generation_config.json and config.json; the tokenizer adds its own."""
    bos_id: int | None
    tokenizer: Path | None
    """Directory with tokenizer.json; None (dummy weights only): bytes are tokens."""
    chat_template: str | None = None
    """Replaces the tokenizer's own."""
    sampling: SamplingParams = SamplingParams()
    """Defaults of requests: what generation_config.json says, over the API's own."""

    @property
    def size(self) -> int:
        """Bytes of the files with the weights."""
        parts = map(self.path.with_name, gguf_parts(self.path.name))
        files = parts if self.path.is_file() else self.path.glob("*.safetensors")
        return sum(file.stat().st_size for file in files)


Check = Callable[[Config, bool], object]
"""Raises `ModelError` for a config.json that cannot be served; it is told whether this lies in a
sentence-transformers directory."""


def _readable(config: Config, embeds: bool) -> None:
    """Check what can be checked without torch and transformers."""
    read_spec(config, PoolingSpec() if embeds else None)


def resolve(config: ModelConfig, progress: Progress, check: Check = _readable) -> Checkpoint:
    """Find the checkpoint that `config` names, fetching it when it has to be fetched. What `check` refuses is
    not fetched.

    Reads and writes files and may run for minutes: call it before the loop starts or in a thread.
    Raises `ModelError` with one line that says what to change.
    """
    offline = _offline(config)
    name = config.model
    path = _local_path(config)
    if not name:
        return _from_gguf(default_model(offline, progress), DEFAULT.name, config, progress)
    if path.is_dir():
        return _from_directory(path, path.resolve().name, config, progress, check)
    if path.is_file():
        return _from_gguf(path, gguf_stem(path.name), config, progress)
    if _HUB_ID.fullmatch(name) and path.suffix != ".gguf":
        found = _from_hub(config, offline, progress, check)
        return _from_directory(found, name, config, progress, check)
    raise ModelError(
        f"there is no {name!r}. --model takes a directory with config.json, a .gguf file "
        "or a hub id like org/name."
    )


def resolve_draft(name: str, config: ModelConfig, progress: Progress) -> Path | None:
    """Where the draft model of speculative decoding lies, None for no name; a hub id is fetched, with the
    settings of `config`. See `resolve`."""
    if not name:
        return None
    takes = "--speculative-draft-model-path takes a directory with config.json, a .gguf file or a hub id."
    for path in (Path(name).expanduser(), PACKAGE_ROOT / name):
        if path.is_dir() and not (path / "config.json").is_file():
            raise ModelError(f"{path} has no config.json: {takes}")
        if path.exists():
            return path
    if not _HUB_ID.fullmatch(name):
        raise ModelError(f"there is no {name!r}: {takes}")
    offline = _offline(config)
    progress(f"fetching {name} from the Hugging Face hub, unless it is cached")
    return _download(name, offline, [*_HUB_CONFIG, _HUB_WEIGHTS])


def resolve_adapter(name: str, config: ModelConfig, progress: Progress) -> Path:
    """Where a LoRA adapter lies; a hub id is fetched. Raises `ModelError`. See `resolve_draft`."""
    path = Path(name).expanduser()
    if not path.exists() and _HUB_ID.fullmatch(name):
        progress(f"fetching {name} from the Hugging Face hub, unless it is cached")
        path = _download(name, _offline(config), [ADAPTER, "*.safetensors"])
    if not (path / ADAPTER).is_file():
        raise ModelError(f"{path} has no {ADAPTER}: --lora takes a directory of an adapter or a hub id.")
    return path


def _local_path(config: ModelConfig) -> Path:
    """Where the model would lie on this machine. Raises `ModelError` if it does and a revision is wanted."""
    path = Path(config.model).expanduser()
    if config.model and not path.exists() and (PACKAGE_ROOT / config.model).is_dir():
        path = PACKAGE_ROOT / config.model
    if config.revision and path.exists():
        named = path if config.model else "none"
        raise ModelError(f"--revision {config.revision} is of a hub id, and --model names {named}.")
    return path


def _offline(config: ModelConfig) -> bool:
    return config.offline or (read("HF_HUB_OFFLINE") or "").lower() in ("1", "true", "yes", "on")


def _from_directory(
    path: Path, name: str, config: ModelConfig, progress: Progress, check: Check
) -> Checkpoint:
    facts = _facts(path, config)
    if facts is None:
        ggufs = sorted(file.name for file in path.glob("*.gguf"))
        hint = f" Name the file: --model {path / ggufs[0]}." if ggufs else ""
        raise ModelError(f"{path} has no config.json, so it is no Hugging Face model directory.{hint}")
    # First: before 200 GB are downloaded of a model that cannot be served.
    _check_supported(path, facts, check)
    if config.load_format != "dummy":
        _check_weights(path)
    return _checkpoint(path, path, facts, name, config, progress)


def _from_gguf(path: Path, name: str, config: ModelConfig, progress: Progress) -> Checkpoint:
    converted = from_gguf(path, progress, with_vocabulary=not config.tokenizer)
    facts = _facts(converted, config)
    if facts is None:
        raise ModelError(f"{converted} is damaged. Remove it and start again.")
    return _checkpoint(path, converted, facts, name, config, progress)


def _checkpoint(
    path: Path, directory: Path, facts: dict[str, Any], name: str, config: ModelConfig, progress: Progress
) -> Checkpoint:
    """The weights at `path` with what `directory` says of them."""
    return Checkpoint(
        names=tuple(filter(None, config.served_model_name)) or (name,),
        path=path,
        config=facts,
        eos_ids=_eos_ids(directory, facts),
        bos_id=next(iter(Fields(facts).ids("bos_token_id")), None),
        tokenizer=_tokenizer(directory, config, progress),
        chat_template=_chat_template(config),
        sampling=_sampling(directory, config),
    )


def _facts(path: Path, config: ModelConfig) -> dict[str, Any] | None:
    """A directory's config.json with what replaces its fields; None if there is none. Raises `ConfigError`
    for overrides that are no object."""
    facts = read_object(path / "config.json")
    if facts is None or not config.hf_overrides:
        return facts
    try:
        return facts | msgspec.json.decode(config.hf_overrides, type=dict[str, Any])
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"--hf-overrides must be a JSON object, as '{{\"rope_theta\": 10000}}': {error}."
        ) from error


def _from_hub(config: ModelConfig, offline: bool, progress: Progress, check: Check) -> Path:
    """Directory of a hub id, downloaded when it is not in the hub's own cache: its configuration first,
    and the rest only when that can be served."""
    name, revision = config.model, config.revision
    if not offline:
        progress(f"fetching {name} from the Hugging Face hub, unless it is cached")
    found = _download(name, offline, _HUB_CONFIG, revision)
    if (facts := _facts(found, config)) is not None:
        _check_supported(found, facts, check)
    dummy = config.load_format == "dummy"
    wanted = [pattern for pattern in _HUB_FILES if not (dummy and pattern == _HUB_WEIGHTS)]
    return _download(name, offline, wanted, revision)


def _download(name: str, offline: bool, patterns: list[str], revision: str = "") -> Path:
    import huggingface_hub

    try:
        found = huggingface_hub.snapshot_download(
            name, revision=revision or None, allow_patterns=patterns, local_files_only=offline
        )
    except (OSError, ValueError, RuntimeError) as error:  # its HTTP and cache errors are all of these
        if offline:
            raise NotFetched(
                f"there is no directory {name!r}, and the hub id {name} is not in the local hub cache while "
                "--offline is set. Start once without it."
            ) from error
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        which = f"revision {revision} of {name}" if revision else name
        raise ModelError(
            f"there is no directory {name!r}, and {which} cannot be fetched from the hub: {reason} "
            "Check the name, the network and, for a gated model, your hub login."
        ) from error
    return Path(found)


def _check_supported(path: Path, facts: Mapping[str, Any], check: Check) -> None:
    """Raise `ModelError` for a config.json that nothing here runs."""
    try:
        check(facts, (path / "modules.json").is_file())
    except ModelError as error:
        raise ModelError(f"{path.name} cannot be served: {error}") from error


def _check_weights(path: Path) -> None:
    """Raise `ModelError` unless all the safetensors files that should be there are there."""
    index = read_object(path / "model.safetensors.index.json")
    if index is not None:
        if not isinstance(shards := index.get("weight_map"), dict):
            raise ModelError(
                f"{path}: model.safetensors.index.json has no weight_map from tensors to files. "
                "Download it again."
            )
        names = set(map(str, shards.values()))
        if missing := sorted(name for name in names if not (path / name).is_file()):
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise ModelError(
                f"{path} lacks {missing[0]}{more}, which model.safetensors.index.json names. "
                "Download the model again."
            )
        return
    if any(path.glob("*.safetensors")):
        return
    if any(path.glob("*.bin")) or any(path.glob("*.pt")):
        raise ModelError(
            f"{path} has weights as pickles only, which can run code when read. Convert them to safetensors."
        )
    raise ModelError(
        f"{path} has no *.safetensors. Download the weights, or use --load-format dummy for random ones."
    )


def _tokenizer(path: Path, config: ModelConfig, progress: Progress) -> Path | None:
    source = Path(config.tokenizer).expanduser() if config.tokenizer else path
    if config.tokenizer and not source.is_dir():
        raise ModelError(f"--tokenizer {config.tokenizer}: there is no such directory.")
    if (source / "tokenizer.json").is_file():
        return source
    slow = any((source / name).is_file() for name in SLOW)
    if config.load_format == "dummy" and not slow and not config.tokenizer:
        return None
    return from_slow(source, progress)


def _chat_template(config: ModelConfig) -> str | None:
    if not config.chat_template:
        return None
    try:
        return Path(config.chat_template).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read --chat-template {config.chat_template}: {error}.") from error


def _sampling(path: Path, config: ModelConfig) -> SamplingParams:
    """Defaults of sampling parameters. Raises `ModelError` for a value that no request could have."""
    if config.generation_config == "none":
        return SamplingParams()
    requested = read_object(path / "generation_config.json") or {}
    given = {name: requested[name] for name in _SAMPLING if requested.get(name) is not None}
    if given.get("top_k") == -1:  # the whole vocabulary, as vLLM spells it
        given["top_k"] = 0
    try:
        params = msgspec.convert(given, SamplingParams)
        check(params, vocab_size=0)  # no field among them names a token
    except (msgspec.ValidationError, RequestError) as error:
        raise ModelError(
            f"{path / 'generation_config.json'}: {error} Fix it, or start with --generation-config none."
        ) from error
    if given:
        listed = ", ".join(f"{name} {value}" for name, value in given.items())
        log.info("defaults of requests, from generation_config.json: %s", listed)
    return params


def _eos_ids(path: Path, facts: Mapping[str, Any]) -> tuple[int, ...]:
    name = "generation_config.json"
    generation, config = Fields(read_object(path / name) or {}, name), Fields(facts)
    text = Fields(config.group("text_config"), "config.json: text_config")
    found = (fields.ids("eos_token_id") for fields in (generation, config, text))
    return next(filter(None, found), ())
