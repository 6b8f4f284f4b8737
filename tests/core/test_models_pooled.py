"""Configs of encoders, embedders and classifiers, and how sentence-transformers directories pool."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from core.errors import ModelError
from core.models import ModelSpec, PoolingSpec, read_spec, sentence_pooling
from tests.rigs.model_config import BASE

MODULES = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]


def spec(architecture: str, **changes: object) -> ModelSpec:
    return read_spec({**BASE, "architectures": [architecture], **changes})


def directory(
    pooling: dict[str, object], modules: list[tuple[str, str]] = MODULES, **files: object
) -> Callable[[str], object]:
    """Reads the files of a sentence-transformers directory that is not there."""
    listed = [{"type": f"sentence_transformers.models.{kind}", "path": place} for kind, place in modules]
    return {"modules.json": listed, "1_Pooling/config.json": pooling, **files}.get


def test_bert() -> None:
    got = spec("BertModel", layer_norm_eps=1e-12, type_vocab_size=2, hidden_act="gelu")
    assert (got.causal, got.kv_layers, got.task) == (False, 0, "embed")
    assert got.encoder is not None and (got.encoder.token_types, got.encoder.first_position) == (2, 0)
    assert (got.pooling.kind, got.pooling.normalize, got.context_length) == ("mean", True, 1000)


def test_roberta_begins_behind_the_padding_id() -> None:
    got = spec("XLMRobertaModel", type_vocab_size=1, pad_token_id=1, max_position_embeddings=514)
    assert got.encoder is not None and (got.encoder.token_types, got.encoder.first_position) == (1, 2)
    assert got.context_length == 512


@pytest.mark.parametrize(
    ("changes", "labels", "activation"),
    [
        ({}, ("LABEL_0", "LABEL_1"), "softmax"),
        ({"num_labels": 1}, ("LABEL_0",), "sigmoid"),
        ({"id2label": {"1": "bad", "0": "good", "10": "c"}}, ("good", "bad", "c"), "softmax"),
        ({"num_labels": 1, "problem_type": "regression"}, ("LABEL_0",), "none"),
        ({"problem_type": "multi_label_classification"}, ("LABEL_0", "LABEL_1"), "sigmoid"),
        (
            {"num_labels": 1, "sentence_transformers": {"activation_fn": "torch.nn.modules.linear.Identity"}},
            ("LABEL_0",),
            "none",
        ),
        (
            {"sbert_ce_default_activation_function": "torch.nn.modules.activation.Sigmoid"},
            ("LABEL_0", "LABEL_1"),
            "sigmoid",
        ),
    ],
)
def test_classes(changes: dict[str, object], labels: tuple[str, ...], activation: str) -> None:
    for architecture, kind in (
        ("BertForSequenceClassification", "first"),
        ("Qwen2ForSequenceClassification", "last"),
    ):
        got = spec(architecture, **changes)
        assert got.task == "classify"
        assert (got.pooling.kind, got.pooling.labels, got.pooling.activation) == (kind, labels, activation)


@pytest.mark.parametrize(
    ("architecture", "changes", "named"),
    [
        ("BertModel", {"position_embedding_type": "relative_key"}, "position_embedding_type"),
        ("BertModel", {"is_decoder": True}, "is_decoder"),
        ("BertModel", {"hidden_size": 66}, "hidden_size"),
        ("BertModel", {"quantization_config": {}}, "quantization_config"),
        ("RobertaModel", {"max_position_embeddings": 2}, "max_position_embeddings"),
        ("Qwen2Model", {"is_causal": False}, "is_causal"),
        ("BertForSequenceClassification", {"id2label": {"a": "b"}}, "id2label"),
        (
            "BertForSequenceClassification",
            {"sentence_transformers": {"activation_fn": "torch.nn.Tanhshrink"}},
            "activation",
        ),
        ("BertForMaskedLM", {}, "BertForMaskedLM is not supported.*BertForSequenceClassification"),
    ],
)
def test_errors_name_the_field(architecture: str, changes: dict[str, object], named: str) -> None:
    with pytest.raises(ModelError, match=named):
        spec(architecture, **changes)


@pytest.mark.parametrize(
    ("pooling", "kind"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, "mean"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": False}, "first"),
        ({"pooling_mode_lasttoken": True}, "last"),
        ({"pooling_mode": "lasttoken"}, "last"),
    ],
)
def test_pooling_of_a_directory(pooling: dict[str, object], kind: str) -> None:
    found = sentence_pooling(directory(pooling))
    assert found == PoolingSpec(kind=kind, normalize=True)  # type: ignore[arg-type]


def test_without_a_module_vectors_keep_their_length() -> None:
    found = sentence_pooling(directory({"pooling_mode": "mean"}, MODULES[:2]))
    assert found is not None and not found.normalize


def test_a_directory_may_know_of_fewer_tokens() -> None:
    read = directory({"pooling_mode": "mean"}, **{"sentence_bert_config.json": {"max_seq_length": 256}})
    got = read_spec({**BASE, "architectures": ["BertModel"]}, sentence_pooling(read))
    assert got.context_length == 256 and not got.pooling.lowercase


@pytest.mark.parametrize(("most", "length"), [(3000, 3000), (9000, 4000)])
def test_a_directory_may_know_of_more_tokens_than_were_trained(most: int, length: int) -> None:
    rope = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    read = directory({"pooling_mode": "mean"}, **{"sentence_bert_config.json": {"max_seq_length": most}})
    got = read_spec({**BASE, "architectures": ["Qwen3Model"], "rope_scaling": rope}, sentence_pooling(read))
    assert got.context_length == length


def test_a_directory_may_read_texts_in_lower_case() -> None:
    files = {"sentence_bert_config.json": {"max_seq_length": None, "do_lower_case": True}}
    found = sentence_pooling(directory({"pooling_mode": "mean"}, **files))
    assert found is not None and (found.lowercase, found.max_tokens) == (True, 0)


def test_a_directory_makes_embeddings_whatever_head_its_config_names() -> None:
    pooling = sentence_pooling(directory({"pooling_mode_lasttoken": True}))
    got = read_spec({**BASE, "architectures": ["Qwen3ForCausalLM"]}, pooling)
    assert (got.architecture, got.task, got.pooling.kind) == ("Qwen3Model", "embed", "last")


def test_other_directories_say_nothing() -> None:
    assert sentence_pooling(lambda place: None) is None


@pytest.mark.parametrize(
    ("pooling", "modules", "named"),
    [
        ({"pooling_mode": "max"}, MODULES, "pooling max is not supported"),
        ({"pooling_mode_cls_token": True, "pooling_mode_mean_tokens": True}, MODULES, "cls and mean"),
        ({}, MODULES, "of no kind"),
        ({"pooling_mode": "mean"}, [*MODULES, ("Dense", "3_Dense")], "Dense is not supported"),
    ],
)
def test_what_would_give_other_vectors_is_refused(
    pooling: dict[str, object], modules: list[tuple[str, str]], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        sentence_pooling(directory(pooling, modules))
