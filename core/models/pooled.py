"""Configs of embedding and classification models: decoders without a head or with one for classes, and the
BERT family. Defaults are those of transformers' config classes."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from core.models.fields import Config, Fields
from core.models.read import activation_of, architecture_of, dtype_of, refuse_quantised
from core.models.spec import Activation, EncoderSpec, ModelSpec, Pooling, PoolingSpec

Reader = Callable[[Fields], ModelSpec]

_GENERATES = "ForCausalLM"
_ACTIVATIONS: Mapping[str, Activation] = {"Identity": "none", "Sigmoid": "sigmoid", "Softmax": "softmax"}
"""torch's names for what sentence-transformers' cross-encoders put behind their head."""


def without_lm_head(config: Config) -> Config:
    """The config of the base model of one with a language-model head; others stay as they are."""
    architecture = architecture_of(Fields(config))
    if not architecture.endswith(_GENERATES):
        return config
    return {**config, "architectures": [architecture.removesuffix(_GENERATES) + "Model"]}


def embedder(read: Reader) -> Reader:
    """A decoder whose last hidden state is its output."""

    def reader(fields: Fields) -> ModelSpec:
        if not fields.flag("is_causal", True):
            raise fields.wrong("is_causal", "true: decoders that see forward are not supported")
        return msgspec.structs.replace(read(fields), task="embed", tied=False)

    return reader


def classifier(read: Reader, of: Pooling = "last") -> Reader:
    """A model with a head for classes on one token: a decoder's last, an encoder's first."""

    def reader(fields: Fields) -> ModelSpec:
        pooling = _classes(fields, PoolingSpec(kind=of))
        return msgspec.structs.replace(read(fields), task="classify", tied=False, pooling=pooling)

    return reader


def bert(fields: Fields) -> ModelSpec:
    """BertModel. Mean pooling by default, as in sentence-transformers."""
    return _encoder(fields, first_position=0)


def roberta(fields: Fields) -> ModelSpec:
    """RobertaModel and XLMRobertaModel: positions are counted from behind the padding id."""
    return _encoder(fields, first_position=fields.count("pad_token_id", 1) + 1)


def _encoder(fields: Fields, first_position: int) -> ModelSpec:
    refuse_quantised(fields, int4=False)
    if fields.text("position_embedding_type", "absolute") != "absolute":
        raise fields.wrong("position_embedding_type", "absolute")
    if fields.flag("is_decoder"):
        raise fields.wrong("is_decoder", "false")
    hidden, heads = fields.size("hidden_size", 768), fields.size("num_attention_heads", 12)
    if hidden % heads:
        raise fields.wrong("hidden_size", f"a multiple of num_attention_heads ({heads})")
    rows = fields.size("max_position_embeddings", 512)
    if rows <= first_position:
        raise fields.wrong("max_position_embeddings", f"more than {first_position}")
    return ModelSpec(
        architecture=architecture_of(fields),
        vocab_size=fields.size("vocab_size"),
        hidden=hidden,
        layers=fields.size("num_hidden_layers", 12),
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        intermediate=fields.size("intermediate_size", 3072),
        activation=activation_of(fields, "hidden_act", "gelu"),
        norm_eps=fields.number("layer_norm_eps", 1e-12),
        qkv_bias=True,
        out_bias=True,
        mlp_bias=True,
        encoder=EncoderSpec(token_types=fields.size("type_vocab_size", 2), first_position=first_position),
        task="embed",
        pooling=PoolingSpec(kind="mean"),
        max_position=rows - first_position,
        dtype=dtype_of(fields),
    )


def _classes(fields: Fields, pooling: PoolingSpec) -> PoolingSpec:
    """Labels, and the activation of their logits: that of the sentence-transformers config, else by
    `problem_type`, else sigmoid for one class and softmax for several."""
    named = fields.group("id2label")
    if named and not all(isinstance(label, str) and key.isdecimal() for key, label in named.items()):
        raise fields.wrong("id2label", "an object of class numbers and their names")
    labels = [str(named[key]) for key in sorted(named, key=int)]
    if not labels:
        labels = [f"LABEL_{i}" for i in range(fields.size("num_labels", 2))]
    return msgspec.structs.replace(
        pooling, labels=tuple(labels), activation=_activation(fields, len(labels)), normalize=False
    )


def _activation(fields: Fields, classes: int) -> Activation:
    written = fields.text("sbert_ce_default_activation_function", "") or Fields(
        fields.group("sentence_transformers")
    ).text("activation_fn", "")
    name = written.rpartition(".")[2]
    if name and name not in _ACTIVATIONS:
        raise fields.wrong("sentence_transformers", f"an activation among {', '.join(_ACTIVATIONS)}")
    if name:
        return _ACTIVATIONS[name]
    match fields.text("problem_type", ""):
        case "regression":
            return "none"
        case "multi_label_classification":
            return "sigmoid"
    return "sigmoid" if classes == 1 else "softmax"
