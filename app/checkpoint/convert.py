"""Foreign model files as a Hugging Face directory without weights.

A .gguf file keeps configuration, vocabulary and chat template as metadata; some older directories
have a tokenizer that only `transformers` can read. Both are converted once into
config.json (GGUF only), generation_config.json (GGUF only), tokenizer.json and
tokenizer_config.json, so that everything else knows one format, and later starts import neither
`gguf` (2 s to walk a vocabulary) nor `transformers` (5 s).
"""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from core.env import cache_dir, read_object
from core.errors import ModelError
from core.models.gguf import GgufFacts, gguf_config, gguf_facts

_FORMAT = 3
"""Part of the cache key: raise it when what is written changes."""

_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_DIGITS: Mapping[str, str] = {"llama-bpe": r"\p{N}{1,3}", "qwen2": r"\p{N}"}
"""The pre-tokenizer split of the Llama 3 and Qwen vocabularies, and how each splits numbers."""


def from_gguf(path: Path, progress: Callable[[str], None]) -> Path:
    """Directory for a .gguf file, from the cache when this very file was seen before."""

    def write(folder: Path) -> None:
        progress(f"reading the configuration and vocabulary of {path.name} (once)")
        facts = _read_gguf(path)
        fields, config = facts.fields, gguf_config(facts)
        generation: dict[str, Any] = {
            key: config[key] for key in ("bos_token_id", "eos_token_id") if key in config
        }
        tokenizer, settings = _read_tokenizer(path.parent, path.name)
        tokenizer = with_split(tokenizer, str(fields.get("tokenizer.ggml.pre")))
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        settings |= _tokenizer_settings(fields)
        _write(folder / "tokenizer_config.json", settings)
        _write(folder / "generation_config.json", generation)
        _write(folder / "config.json", config)

    return _cached(path, write)


def from_slow(directory: Path, progress: Callable[[str], None]) -> Path:
    """Directory with tokenizer.json and tokenizer_config.json for one that has only the files of a
    slow tokenizer (tokenizer.model, or vocab.json and merges.txt)."""
    source = next(
        (directory / n for n in ("tokenizer.model", "vocab.json") if (directory / n).is_file()), None
    )
    if source is None:
        raise ModelError(
            f"{directory} has no tokenizer: tokenizer.json, tokenizer.model or vocab.json is needed. "
            "Copy it there or name a directory with --tokenizer."
        )

    def write(folder: Path) -> None:
        progress(f"converting the tokenizer of {directory.name} (once)")
        tokenizer, settings = _read_tokenizer(directory, None)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        settings |= read_object(directory / "tokenizer_config.json") or {}
        _write(folder / "tokenizer_config.json", settings)

    return _cached(source, write)


def _cached(source: Path, write: Callable[[Path], None]) -> Path:
    """What `write` leaves in an empty directory, kept under the name, size and time of `source`."""
    stat = source.stat()
    stem = source.stem if source.suffix == ".gguf" else source.parent.name
    target = cache_dir() / "converted" / f"{stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{_FORMAT}"
    if target.is_dir():
        return target
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        folder = Path(tempfile.mkdtemp(dir=target.parent, prefix="new-"))
        try:
            write(folder)
            folder.rename(target)
        except OSError:
            if not target.is_dir():  # else another start finished first, with the same content
                raise
        finally:
            shutil.rmtree(folder, ignore_errors=True)
    except OSError as error:
        raise ModelError(
            f"cannot keep the converted files of {source.name} in {target.parent}: "
            f"{error.strerror or error}. Point LOOM_CACHE at a writable directory."
        ) from error
    return target


def _write(path: Path, content: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(content, ensure_ascii=False, indent=1), encoding="utf-8")


def _read_gguf(path: Path) -> GgufFacts:
    import gguf

    try:
        reader = gguf.GGUFReader(path)
        bulk = ("tokenizer.ggml.tokens", "tokenizer.ggml.merges", "tokenizer.ggml.scores")
        fields = {f.name: f.contents() for f in reader.fields.values() if f.name not in bulk}
        facts = gguf_facts(fields, reader.tensors)
    except (ValueError, IndexError, KeyError, OSError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a readable .gguf file ({error}). --model takes a directory with config.json, "
            "a .gguf file or a hub id like org/name."
        ) from error
    if fields.get("split.count", 1) > 1:
        raise ModelError(
            f"{path.name} is one part of a split .gguf. Join the parts with `gguf-split --merge`."
        )
    return facts


def _tokenizer_settings(fields: Mapping[str, Any]) -> dict[str, Any]:
    settings: dict[str, Any] = {}
    if template := fields.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    # Absent: sentencepiece vocabularies begin with BOS, the others do not.
    add_bos = fields.get("tokenizer.ggml.add_bos_token", fields.get("tokenizer.ggml.model") == "llama")
    settings["add_bos_token"] = bool(add_bos)
    return settings


def with_split(tokenizer: str, name: str) -> str:
    """The tokenizer with the split into words that the .gguf file names, and the decoder that belongs to it.

    `transformers` knows one split for most BPE vocabularies: without this, "1234" and much
    punctuation would become other tokens than the model was trained on. Some of its versions also write a
    decoder for sentencepiece's vocabularies: then no table of texts could be made (`app.text.vocab`), and
    detokenization took 27% of the event loop's time at 64 streams.
    """
    content = json.loads(tokenizer)
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    if name == "smollm":
        first: dict[str, Any] = {"type": "Digits", "individual_digits": True}
        second = byte_level | {"use_regex": True}
    elif name in _DIGITS:
        pattern = _WORDS.replace("DIGITS", _DIGITS[name])
        first = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        second = byte_level | {"use_regex": False}
    else:
        return tokenizer
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [first, second]}
    content["decoder"] = byte_level | {"use_regex": True}
    return json.dumps(content, ensure_ascii=False)


def _read_tokenizer(directory: Path, gguf_file: str | None) -> tuple[str, dict[str, Any]]:
    """Content of tokenizer.json and the special tokens, through `transformers`."""
    from transformers import AutoTokenizer

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **extra)
        names = ("bos_token", "eos_token", "unk_token", "pad_token")
        settings = {name: str(token) for name in names if (token := getattr(tokenizer, name, None))}
        return tokenizer.backend_tokenizer.to_str(), settings
    except Exception as error:  # a damaged file meets several libraries, each with its own errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"cannot read the tokenizer of {directory / (gguf_file or '')}: {reason}. "
            "Name a directory with tokenizer.json with --tokenizer."
        ) from error
