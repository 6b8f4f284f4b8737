"""Foreign model files as a Hugging Face directory without weights.

A .gguf file keeps configuration, vocabulary and chat template as metadata; some older directories
have a tokenizer that only `transformers` can read. Both are converted once into
config.json (GGUF only), generation_config.json (GGUF only), tokenizer.json and
tokenizer_config.json, so that everything else knows one format, and later starts import neither
`gguf` nor `transformers` (5 s).
"""

from __future__ import annotations

import json
import shutil
import struct
import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import tokenizers

from app.checkpoint.bpe import byte_level_bpe, tiktoken_bpe
from app.checkpoint.spm import sentencepiece_bpe
from core.env import cache_dir, read_object
from core.errors import ModelError
from core.models.gguf import GgufFacts, check_parts, gguf_config, gguf_facts, gguf_parts

_FORMAT = 6
"""Part of the cache key: raise it when what is written changes."""


SLOW = ("tiktoken.model", "tokenizer.model", "vocab.json")
"""Files of tokenizers without tokenizer.json: Kimi's, sentencepiece's, and BPE's beside merges.txt."""

_SETTINGS: Mapping[str, str] = {
    "tokenizer.chat_template": "chat_template",
    "tokenizer.ggml.add_bos_token": "add_bos_token",
}
"""Metadata that are settings of tokenizer_config.json."""


def from_gguf(path: Path, progress: Callable[[str], None], with_vocabulary: bool = True) -> Path:
    """Directory for a .gguf file, from the cache when this very file was seen before; its vocabulary may be
    left out."""

    def write(folder: Path) -> None:
        progress(f"reading the configuration and vocabulary of {path.name} (once)")
        facts = _read_gguf(path)
        config = gguf_config(facts)
        generation = {"bos_token_id": config.get("bos_token_id"), "eos_token_id": _ends(facts.fields)}
        settings: dict[str, Any] = {}
        if with_vocabulary:
            tokenizer, settings = _read_tokenizer(path, partial(_vocabulary, path, facts.fields))
            (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        settings |= {
            ours: facts.fields[theirs] for theirs, ours in _SETTINGS.items() if theirs in facts.fields
        }
        _write(folder / "tokenizer_config.json", settings)
        _write(folder / "generation_config.json", generation)
        _write(folder / "config.json", config)

    return _cached(path, write, "" if with_vocabulary else "-bare")


def from_slow(directory: Path, progress: Callable[[str], None]) -> Path:
    """Directory with tokenizer.json and tokenizer_config.json for one that has only the files of a
    slow tokenizer (`SLOW`)."""
    source = next((directory / name for name in SLOW if (directory / name).is_file()), None)
    if source is None:
        raise ModelError(
            f"{directory} has no tokenizer: tokenizer.json, {', '.join(SLOW[:-1])} or {SLOW[-1]} is needed. "
            "Copy it there or name a directory with --tokenizer."
        )

    def write(folder: Path) -> None:
        progress(f"converting the tokenizer of {directory.name} (once)")
        given = read_object(directory / "tokenizer_config.json") or {}
        through = partial(_through_transformers, directory)
        read = partial(_tiktoken, source, given) if source.name == SLOW[0] else through
        tokenizer, settings = _read_tokenizer(directory, read)
        (folder / "tokenizer.json").write_text(tokenizer, encoding="utf-8")
        _write(folder / "tokenizer_config.json", settings | given)

    return _cached(source, write)


def _cached(source: Path, write: Callable[[Path], None], kind: str = "") -> Path:
    """Directory with what `write` makes, cached under name, size and time of `source`, and `kind`."""
    stat = source.stat()
    stem = source.stem if source.suffix == ".gguf" else source.parent.name
    target = cache_dir() / "converted" / f"{stem}-{stat.st_size:x}-{stat.st_mtime_ns:x}-{_FORMAT}{kind}"
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
    """Read the metadata of the file at `path`, or of all files of a split one that begins there."""
    import gguf

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads all entries of an array at once. The library makes several numpy arrays for each entry, which
        takes 15 s for Gemma's 262,144 tokens, scores and types. Refuses arrays that are longer than the file,
        and arrays of arrays, which no model has."""

        def _get_field_parts(self, orig_offs: int, raw_type: int) -> Any:
            kinds, end = gguf.GGUFValueType, orig_offs + 12
            if raw_type != kinds.ARRAY or self.byte_order == "S":
                return super()._get_field_parts(orig_offs, raw_type)
            item, count = struct.unpack_from("<IQ", self.data, orig_offs)
            if count > len(self.data) or item == kinds.ARRAY:
                raise ValueError(f"an array of {count} entries of type {item}")
            if item == kinds.STRING:
                parts, end = _strings(memoryview(self.data), end, count)
            else:
                parts = [self._get(end, self.gguf_scalar_to_np[item], count)]
                if len(parts[0]) < count:
                    raise ValueError(f"an array of {count} entries ends after {len(parts[0])}")
                end += parts[0].nbytes
            return end - orig_offs, parts, list(range(len(parts))), [kinds.ARRAY, kinds(item)]

    parts, readers = gguf_parts(path.name), []
    for part in map(path.with_name, parts):
        try:
            readers.append(Reader(part))
        except (ValueError, IndexError, KeyError, OSError, OverflowError, struct.error) as error:
            raise ModelError(
                f"{part} is not a readable .gguf file ({error}). --model takes a directory with config.json, "
                "a .gguf file or a hub id like org/name."
            ) from error
    try:
        named = {field.name: field for field in readers[0].fields.values()}
        scores = named.pop("tokenizer.ggml.scores", None)
        fields = {name: field.contents() for name, field in named.items()}
        if scores is not None and fields.get("tokenizer.ggml.model") == "llama":
            fields[scores.name] = scores.contents()  # others have no use for them
        facts = gguf_facts(fields, [tensor for reader in readers for tensor in reader.tensors])
    except (ValueError, IndexError, KeyError) as error:
        raise ModelError(f"{path} is not a readable .gguf file ({error}): fetch it again.") from error
    check_parts(parts, fields)
    return facts


def _strings(data: memoryview, at: int, count: int) -> tuple[list[memoryview], int]:
    """Return the bytes of each of the `count` strings that start at `at` in a .gguf file, and the position
    behind the last one."""
    found = []
    for _ in range(count):
        first = at + 8
        at = first + struct.unpack_from("<Q", data, at)[0]
        if at > len(data):
            raise ValueError(f"a string of {at - first} bytes at {first}")
        found.append(data[first:at])
    return found, at


def _ends(fields: Mapping[str, Any]) -> list[int]:
    """Tokens that end an answer: the ends of a text, a turn, and a message that calls a tool. In gpt-oss a
    message's end is none, and files of Phi-3 name the text's end alone."""
    kinds = ("eos",) if fields.get("general.architecture") == "gpt-oss" else ("eos", "eot", "eom")
    ends = [fields.get(f"tokenizer.ggml.{kind}_token_id") for kind in kinds]
    tokens = fields.get("tokenizer.ggml.tokens")
    if fields.get("general.architecture") == "phi3" and isinstance(tokens, list) and "<|end|>" in tokens:
        ends.append(tokens.index("<|end|>"))
    return list(dict.fromkeys(each for each in ends if isinstance(each, int)))


Read = tuple[str, dict[str, Any]]
"""Content of tokenizer.json, and settings of tokenizer_config.json."""


def _read_tokenizer(source: Path, read: Callable[[], Read]) -> Read:
    """The tokenizer that `read` finds in `source`. Raises `ModelError` for any error of it."""
    try:
        return read()
    except ModelError:
        raise
    except Exception as error:  # a damaged file meets several libraries, each with its own errors
        reason = str(error).splitlines()[0] if str(error) else type(error).__name__
        raise ModelError(
            f"cannot read the tokenizer of {source}: {reason}. "
            "Name a directory with tokenizer.json with --tokenizer."
        ) from error


def _vocabulary(path: Path, fields: Mapping[str, Any]) -> Read:
    """Read the vocabulary of a .gguf file. Byte-level BPE and sentencepiece are converted here, others by
    `transformers`."""
    model = fields.get("tokenizer.ggml.model")
    if model not in ("gpt2", "llama"):
        tokenizer, settings = _through_transformers(path.parent, path.name)
        return tokenizer, settings | {"add_bos_token": False}
    content, settings = byte_level_bpe(fields) if model == "gpt2" else sentencepiece_bpe(fields)
    return _checked(content), settings


def _tiktoken(source: Path, settings: Mapping[str, Any]) -> Read:
    """Read Kimi's tokenizer: others of that name are split in ways that no file tells."""
    if (kind := settings.get("tokenizer_class")) != "TikTokenTokenizer":
        raise ModelError(
            f"{source} is read of tokenizer_class 'TikTokenTokenizer' (Kimi K2) alone, and "
            f"tokenizer_config.json says {kind!r}. Name a directory with tokenizer.json with --tokenizer."
        )
    return _checked(tiktoken_bpe(source.read_bytes(), settings)), {}


def _checked(content: Mapping[str, Any]) -> str:
    return tokenizers.Tokenizer.from_str(json.dumps(content, ensure_ascii=False)).to_str()


def _through_transformers(directory: Path, gguf_file: str | None = None) -> Read:
    from transformers import AutoTokenizer

    extra = {"gguf_file": gguf_file} if gguf_file else {}
    tokenizer = AutoTokenizer.from_pretrained(str(directory), local_files_only=True, **extra)
    names = ("bos_token", "eos_token", "unk_token", "pad_token")
    settings = {name: str(token) for name in names if (token := getattr(tokenizer, name, None))}
    return tokenizer.backend_tokenizer.to_str(), settings
