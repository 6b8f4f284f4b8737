"""`--model` in all its forms, and one clear line for each way it can be wrong."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import gguf
import numpy as np
import pytest

from app import compose
from app.checkpoint.checkpoint import Checkpoint, resolve, resolve_draft
from app.text.template import ChatTemplate
from app.text.tokenizer import Tokenizer
from core.config import Config, ModelConfig, SpeculativeConfig
from core.errors import ConfigError, ModelError
from core.request import SamplingParams
from gpu.build import check_config
from tests.rigs import vocabularies
from tests.rigs.assets import asset
from tests.rigs.model_config import BASE

CONFIG: dict[str, Any] = {
    **BASE,
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 300,
    "eos_token_id": 2,
    "bos_token_id": 1,
}
QWEN = {"architectures": ["Qwen3_5MoeForConditionalGeneration"]}


def quiet(_: str) -> None:
    pass


def find(model: object, **options: Any) -> Checkpoint:
    return resolve(ModelConfig(model=str(model), **options), quiet, check_config)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing of the user's is read or written."""
    monkeypatch.setenv("LOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    return tmp_path / "cache"


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    path = vocabularies.save(vocabularies.byte_level(), tmp_path / "tiny", eos_token="<|im_end|>")
    (path / "config.json").write_text(json.dumps(CONFIG))
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_directory(directory: Path) -> None:
    found = find(directory)
    assert (found.names, found.path, found.tokenizer) == (("tiny",), directory, directory)
    assert (found.eos_ids, found.bos_id, found.config["vocab_size"]) == ((2,), 1, 300)
    assert find(directory, served_model_name=("other", "else")).names == ("other", "else")


def test_generation_config_names_the_ends(directory: Path) -> None:
    (directory / "generation_config.json").write_text('{"eos_token_id": [5, 6], "temperature": 0.1}')
    assert find(directory).eos_ids == (5, 6)


def test_a_language_model_beside_a_vision_encoder_may_name_the_ends(directory: Path) -> None:
    config = CONFIG | {"text_config": {"eos_token_id": [7, 8]}}
    (directory / "config.json").write_text(json.dumps(config))
    assert find(directory).eos_ids == (2,)
    del config["eos_token_id"]
    (directory / "config.json").write_text(json.dumps(config))
    assert find(directory).eos_ids == (7, 8)


def test_ends_that_are_no_token_ids_are_refused(directory: Path) -> None:
    (directory / "config.json").write_text(json.dumps({**CONFIG, "eos_token_id": ["</s>"]}))
    with pytest.raises(ModelError, match="eos_token_id"):
        find(directory)


def test_sampling_defaults_are_those_of_the_generation_config(directory: Path) -> None:
    told = {"temperature": 0.6, "top_p": 0.95, "top_k": 20, "min_p": None, "do_sample": True, "max_length": 5}
    (directory / "generation_config.json").write_text(json.dumps(told))
    assert find(directory).sampling == SamplingParams(temperature=0.6, top_p=0.95, top_k=20)
    assert find(directory, generation_config="none").sampling == SamplingParams()
    (directory / "generation_config.json").write_text('{"top_k": -1}')
    assert find(directory).sampling == SamplingParams(top_k=0)
    for wrong in ({"temperature": "hot"}, {"temperature": -1}, {"top_p": 2}, {"top_k": 1.5}):
        (directory / "generation_config.json").write_text(json.dumps(wrong))
        with pytest.raises(ModelError, match=rf"generation_config\.json: .*{next(iter(wrong))}.*none"):
            find(directory)
        assert find(directory, generation_config="none").sampling == SamplingParams()


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"architectures": ["Mamba2ForCausalLM"]}, "Mamba2ForCausalLM"),
        ({"quantization_config": {"quant_method": "awq"}}, "quantization_config"),
        ({**QWEN, "text_config": {"quantization_config": {"quant_method": "bitsandbytes"}}}, "bitsandbytes"),
        (
            {**QWEN, "text_config": {"quantization_config": {"quant_method": "mxfp4"}}},
            "'mxfp4' is not served",
        ),
        ({"hidden_size": None}, "hidden_size"),
        ({"rope_scaling": {"rope_type": "ntk"}}, "rope_type"),
    ],
)
def test_what_cannot_be_served_is_refused_before_weights_are_looked_for(
    directory: Path, monkeypatch: pytest.MonkeyPatch, change: dict[str, Any], says: str
) -> None:
    remove("model.safetensors", directory)
    (directory / "config.json").write_text(json.dumps(CONFIG | change))
    with pytest.raises(ModelError, match=f"tiny cannot be served: .*{says}"):
        find(directory)
    asked = []

    def download(
        name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        assert revision is None
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(ModelError, match=says):
        find("org/name")
    assert asked == [["config.json", "modules.json"]]
    (directory / "config.json").write_text(json.dumps(CONFIG))
    (directory / "model.safetensors").write_bytes(b"12345")
    assert find("org/name").size == 5
    assert len(asked) == 3 and "*.safetensors" in asked[2]


def test_what_nothing_drafts_for_is_refused_before_weights_are_fetched(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(name: str, *, allow_patterns: list[str], **how: object) -> str:
        asked.append(allow_patterns)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    config = Config(model=ModelConfig(model="org/name"), speculative=SpeculativeConfig(algorithm="mtp"))
    with pytest.raises(ConfigError, match="mtp: LlamaForCausalLM has no layer for multi-token prediction"):
        compose.find(config, quiet)
    (directory / "modules.json").write_text("[]")
    with pytest.raises(ConfigError, match="mtp: a model of sentence-transformers generates no text"):
        compose.find(config, quiet)
    assert asked == [["config.json", "modules.json"]] * 2


def test_a_revision_is_fetched_and_named_where_it_is_not_there(
    directory: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def download(
        name: str, *, revision: str | None, allow_patterns: list[str], local_files_only: bool
    ) -> str:
        if revision == "gone":
            raise OSError("404")
        asked.append(revision)
        return str(directory)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    assert find("org/name", revision="v1.2").names == ("org/name",)
    assert asked == ["v1.2", "v1.2"]
    with pytest.raises(ModelError, match="revision gone of org/name cannot be fetched from the hub: 404"):
        find("org/name", revision="gone")
    for model in (str(directory), ""):
        with pytest.raises(ModelError, match=r"--revision v1\.2 is of a hub id, and --model names"):
            find(model, revision="v1.2")


def test_fields_of_config_json_are_replaced(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    overrides = '{"rope_theta": 5, "architectures": ["LlamaForCausalLM"]}'
    found = find(directory, hf_overrides=overrides)
    assert found.config == {**CONFIG, "rope_theta": 5, "architectures": ["LlamaForCausalLM"]}
    # Also before weights are fetched: what cannot be served as it is may be served so.
    (directory / "config.json").write_text(json.dumps(CONFIG | {"architectures": ["LamaForCausalLM"]}))
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, **how: str(directory))
    with pytest.raises(ModelError, match="LamaForCausalLM"):
        find("org/name")
    assert find("org/name", hf_overrides=overrides).config["rope_theta"] == 5
    for wrong in ("rope_theta=5", "[1]", '{"a"'):
        with pytest.raises(ConfigError, match="--hf-overrides must be a JSON object"):
            find(directory, hf_overrides=wrong)


def test_dummy_weights_need_only_the_configuration(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    found = find(tmp_path, load_format="dummy")
    assert found.tokenizer is None
    tokenizer = Tokenizer.load(found.tokenizer, found.config["vocab_size"], found.eos_ids, found.bos_id)
    assert tokenizer.decode(tokenizer.encode("hi")) == "hi"
    assert tokenizer.eos_ids == {2}


def test_configurations_of_the_package_are_found_from_any_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    found = resolve(ModelConfig(model="configs/models/qwen3-8b", load_format="dummy"), print)
    assert found.tokenizer is None and found.config["model_type"] == "qwen3"


def test_the_tokenizer_and_template_can_be_elsewhere(directory: Path, tmp_path: Path) -> None:
    other = vocabularies.save(vocabularies.byte_fallback(), tmp_path / "other")
    (tmp_path / "t.jinja").write_text("T")
    found = find(directory, tokenizer=str(other), chat_template=str(tmp_path / "t.jinja"))
    assert (found.tokenizer, found.chat_template) == (other, "T")
    with pytest.raises(ConfigError, match="--chat-template"):
        find(directory, chat_template="/no/such")
    with pytest.raises(ModelError, match="--tokenizer"):
        find(directory, tokenizer="/no/such")


def shards(directory: Path) -> None:
    weights = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (directory / "model.safetensors.index.json").write_text(json.dumps(weights))
    (directory / "model-1.safetensors").write_bytes(b"")


def no_index(directory: Path) -> None:
    (directory / "model.safetensors.index.json").write_text('{"weight_map": ["a"]}')


def remove(name: str, directory: Path) -> None:
    (directory / name).unlink()


def pickles(directory: Path) -> None:
    remove("model.safetensors", directory)
    (directory / "pytorch_model.bin").write_bytes(b"")


def beside_gguf(directory: Path) -> None:
    remove("config.json", directory)
    (directory / "a.gguf").write_bytes(b"GGUF")


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda d: remove("config.json", d), r"no config\.json"),
        (lambda d: remove("model.safetensors", d), "no .*safetensors.* --load-format dummy"),
        (lambda d: remove("tokenizer.json", d), "no tokenizer.*--tokenizer"),
        (lambda d: (d / "config.json").write_text("{"), r"config\.json cannot be read"),
        (lambda d: (d / "config.json").write_text("[]"), "JSON object"),
        (shards, r"lacks model-2\.safetensors"),
        (no_index, r"model\.safetensors\.index\.json has no weight_map"),
        (pickles, "pickles"),
        (beside_gguf, r"--model .*a\.gguf"),
    ],
)
def test_what_is_missing_is_named(directory: Path, spoil: Any, says: str) -> None:
    spoil(directory)
    with pytest.raises(ModelError, match=says) as caught:
        find(directory)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("model", ["/no/such/directory", "no-such", "no/such.gguf", "a/b/c"])
def test_a_wrong_path_says_what_is_taken(model: str) -> None:
    with pytest.raises(ModelError, match="hub id") as caught:
        find(model)
    assert model in str(caught.value)


def test_a_hub_id_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelError, match=r"org/name.*--offline"):
        find("org/name", offline=True)


def test_the_default_model_offline() -> None:
    with pytest.raises(ModelError, match=r"SmolLM2.*--offline"):
        find("", offline=True)


@pytest.mark.parametrize("content", [b"", b"text", b"GGUF", b"GGUF\x03\0\0\0" + b"\xff" * 64])
def test_a_file_that_is_no_gguf(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(content)
    with pytest.raises(ModelError, match=r"x\.gguf is not"):
        find(path)


# -- .gguf -----------------------------------------------------------------------------------------


def write_gguf(
    path: Path,
    architecture: str = "llama",
    pre: str = "smollm",
    model: str = "gpt2",
    split: int = 0,
    **ends: int,
) -> None:
    """A one-layer model's metadata and embedding, with the small byte-level vocabulary. `split`: a head too,
    in another file; `ends`: ids of further tokens by their names in metadata."""
    core = json.loads(vocabularies.byte_level().to_str())
    tokens = sorted(core["model"]["vocab"], key=core["model"]["vocab"].get)
    special = [token["content"] for token in core["added_tokens"] if token["special"]]
    writer = gguf.GGUFWriter(path, architecture, split_max_tensors=split)
    if split:
        writer.add_tensor("output.weight", np.zeros((264, 64), np.float32))
    dimensions(writer)
    writer.add_tokenizer_model(model)
    writer.add_tokenizer_pre(pre)
    for name, token in ends.items():
        writer.add_uint32(f"tokenizer.ggml.{name}", token)
    writer.add_token_list([*tokens, *special])
    writer.add_token_types([gguf.TokenType.NORMAL] * len(tokens) + [gguf.TokenType.CONTROL] * len(special))
    writer.add_token_merges([" ".join(pair) for pair in core["model"]["merges"]])
    writer.add_bos_token_id(len(tokens))
    writer.add_eos_token_id(len(tokens) + 1)
    writer.add_add_bos_token(False)
    writer.add_chat_template("{% for m in messages %}{{ m.content }}{% endfor %}")
    finish(writer, len(tokens) + len(special))


def dimensions(writer: gguf.GGUFWriter) -> None:
    writer.add_context_length(128)
    writer.add_embedding_length(64)
    writer.add_block_count(1)
    writer.add_feed_forward_length(96)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(100_000.0)


def finish(writer: gguf.GGUFWriter, tokens: int) -> None:
    """Add an embedding of so many tokens, and write the file."""
    writer.add_tensor("token_embd.weight", np.zeros((tokens, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file(tmp_path: Path, cache: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path)
    found = find(path)
    assert (found.names, found.path) == (("tiny",), path)
    wanted = {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "max_position_embeddings": 128,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100_000.0,
        "rope_scaling": None,
        "tie_word_embeddings": True,
        "vocab_size": 264,
    }
    assert {key: found.config[key] for key in wanted} == wanted
    assert (found.bos_id, found.eos_ids) == (261, (262,))
    tokenizer = Tokenizer.load(found.tokenizer, found.config["vocab_size"], found.eos_ids, found.bos_id)
    assert tokenizer.encode("hello 12<|im_end|>").tolist() == [259, ord(" "), ord("1"), ord("2"), 262]
    template = ChatTemplate.load(found.tokenizer, found.chat_template, tokenizer.special_tokens)
    assert template.render([{"role": "user", "content": "hi"}]) == "hi"

    # A later start reads the converted files and imports nothing that converts.
    script = (
        "import sys; from app.checkpoint.checkpoint import resolve; from core.config import ModelConfig\n"
        f"found = resolve(ModelConfig(model={str(path)!r}), print)\n"
        "assert found.config['vocab_size'] == 264 and not {'gguf', 'transformers', 'torch'} & {*sys.modules}"
    )
    done = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert done.stdout == ""


def test_ends_and_a_vocabulary_that_transformers_does_not_read(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "granite", "refact", eot_token_id=7, eom_token_id=9)
    found = find(path)
    assert found.eos_ids == (262, 7, 9)
    tokenizer = Tokenizer.load(found.tokenizer, found.config["vocab_size"], found.eos_ids, found.bos_id)
    assert tokenizer.encode("hello 12").tolist() == [259, ord(" "), ord("1"), ord("2")]


def test_a_split_gguf_file(tmp_path: Path) -> None:
    """The first file has the metadata, and the others have tensors of which a config is made, too."""
    path = tmp_path / "tiny.gguf"
    write_gguf(path, split=1)
    first, second = sorted(tmp_path.glob("*.gguf"))
    found = find(first)
    assert found.config["tie_word_embeddings"] is False
    assert (found.names, found.path) == (("tiny",), first)
    assert found.size == first.stat().st_size + second.stat().st_size
    none = first.rename(tmp_path / "tiny-00001-of-00000.gguf")
    with pytest.raises(ModelError, match=r"00000\.gguf is one of 2 files of a split"):
        find(none)
    none.rename(first)
    second.unlink()
    with pytest.raises(ModelError, match=r"00002-of-00002\.gguf is not a readable \.gguf file"):
        find(first, tokenizer=str(tmp_path))


def test_a_vocabulary_that_is_not_known_can_be_replaced(tmp_path: Path) -> None:
    path, other = tmp_path / "tiny.gguf", tmp_path / "other"
    write_gguf(path, pre="gpt-5")
    with pytest.raises(ModelError, match=r"tokenizer\.ggml\.pre 'gpt-5' .*--tokenizer"):
        find(path)
    other.mkdir()
    vocabularies.byte_level().save(str(other / "tokenizer.json"))
    found = find(path, tokenizer=str(other))
    assert (found.tokenizer, found.eos_ids) == (other, (262,))


def write_sentencepiece(path: Path, tokens: Sequence[tuple[str, float, int]], *, prefix: bool | None) -> None:
    """A vocabulary of tokens with scores and types. `prefix`: texts begin with a space, by the file."""
    writer = gguf.GGUFWriter(path, "gemma3")
    dimensions(writer)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_token_list([token for token, _, _ in tokens])
    writer.add_token_scores([score for _, score, _ in tokens])
    writer.add_token_types([kind for _, _, kind in tokens])
    writer.add_bos_token_id(2)
    writer.add_eos_token_id(1)
    writer.add_unk_token_id(3)
    writer.add_add_bos_token(True)
    if prefix is not None:
        writer.add_add_space_prefix(prefix)
    finish(writer, len(tokens))


SPECIAL = ("<pad>", "<eos>", "<bos>", "<unk>", "<start_of_turn>", "<end_of_turn>")
PIECES: list[tuple[str, float, int]] = [
    *((token, -1000.0, gguf.TokenType.CONTROL) for token in SPECIAL),
    *((f"<0x{byte:02X}>", 0.0, gguf.TokenType.BYTE) for byte in range(256)),
    *(
        (token, -1.0 - i, gguf.TokenType.NORMAL)
        for i, token in enumerate(("ll", "he", "hell", "hello", "▁hello"))
    ),
    ("ab", -9.0, gguf.TokenType.NORMAL),
    ("bc", -8.0, gguf.TokenType.NORMAL),
    *((token, -20.0 - i, gguf.TokenType.NORMAL) for i, token in enumerate(("▁", *"heloabc"))),
    ("\n", -1000.0, gguf.TokenType.USER_DEFINED),
]


@pytest.mark.parametrize("prefix", [False, True, None])
def test_a_vocabulary_of_sentencepiece_in_a_gguf_file(
    prefix: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Gemma's and Llama's: no merges but scores, bytes for what has no token, a space in front unless the
    file says no, marks that end turns. Not through transformers, whose versions read them differently."""
    monkeypatch.setitem(sys.modules, "transformers", None)
    write_sentencepiece(path := tmp_path / "tiny.gguf", PIECES, prefix=prefix)
    found = find(path)
    assert found.config["architectures"] == ["Gemma3ForCausalLM"]
    tokenizer = Tokenizer.load(found.tokenizer, len(PIECES), found.eos_ids, found.bos_id)
    at = {token: i for i, (token, _, _) in enumerate(PIECES)}
    text = "hello hello\n éabc<end_of_turn>"
    first = "hello" if prefix is False else "▁hello"
    names = (first, "▁hello", "\n", "▁", "<0xC3>", "<0xA9>", "a", "bc", "<end_of_turn>")
    ids = [at[each] for each in names]
    assert tokenizer.encode(text, add_special=True).tolist() == [2, *ids]
    assert tokenizer.decode(ids[:-1]) == text.removesuffix("<end_of_turn>")
    assert {1, at["<end_of_turn>"]} <= tokenizer.eos_ids


def test_an_unknown_gguf_architecture_is_named(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    write_gguf(path, "mamba")
    with pytest.raises(ModelError, match="'mamba'"):
        find(path)


def test_a_real_directory() -> None:
    found = find(asset("models/stories260K"))
    assert (found.config["vocab_size"], found.eos_ids, found.bos_id) == (512, (1, 2), 1)


@pytest.mark.parametrize("seed", range(4))
def test_a_damaged_gguf_is_one_line(tmp_path: Path, seed: int) -> None:
    write_gguf(tmp_path / "whole.gguf")
    whole, random = (tmp_path / "whole.gguf").read_bytes(), Random(seed)
    for number in range(5):
        damaged = bytearray(whole[: random.randrange(8, len(whole))] if number % 2 else whole)
        for _ in range(8):
            damaged[random.randrange(4, min(len(damaged), 900))] = random.randrange(256)
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(damaged)
        try:
            find(path)
        except ModelError as error:  # and nothing else
            assert "\n" not in str(error) and str(path) in str(error)


@pytest.mark.parametrize(
    "array", [struct.pack("<IQ", 0, 2**60), struct.pack("<IQ", 9, 1) * 2000], ids=["huge", "deep"]
)
def test_an_array_that_no_file_has_is_refused_before_memory_is_taken(tmp_path: Path, array: bytes) -> None:
    path = tmp_path / "x.gguf"
    field = struct.pack("<Q", 1) + b"a" + struct.pack("<I", gguf.GGUFValueType.ARRAY) + array
    path.write_bytes(b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + field)
    with pytest.raises(ModelError, match=r"x\.gguf is not a readable \.gguf file \(an array of "):
        find(path)


@pytest.mark.parametrize("error", [Exception("one\ntwo"), AssertionError(), StopIteration(5)])
def test_whatever_a_tokenizer_of_a_gguf_file_raises_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    write_gguf(tmp_path / "x.gguf", model="llama")

    def refuse(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr("transformers.AutoTokenizer.from_pretrained", refuse)
    with pytest.raises(ModelError, match="cannot read the tokenizer of") as caught:
        find(tmp_path / "x.gguf")
    assert "\n" not in str(caught.value)


def test_a_draft_model_is_a_directory_with_a_config(tmp_path: Path) -> None:
    """Without one its algorithm would not be known, and none would be used."""
    config = ModelConfig(model="m")
    assert resolve_draft("", config, quiet) is None
    with pytest.raises(ModelError, match=r"has no config\.json: --speculative-draft-model-path"):
        resolve_draft(str(tmp_path), config, quiet)
    with pytest.raises(ModelError, match="there is no '/no/where': --speculative-draft-model-path"):
        resolve_draft("/no/where", config, quiet)
    (tmp_path / "config.json").write_text("{}")
    assert resolve_draft(str(tmp_path), config, quiet) == tmp_path
