"""What a model is, in numbers. One record for every family: a family differs in values only."""

from __future__ import annotations

import re
from math import gcd
from typing import Literal

import msgspec

from core.errors import ConfigError

Task = Literal["generate", "embed", "classify"]
"""What a checkpoint was trained for. A model that generates also embeds."""

Pooling = Literal["first", "last", "mean"]

Activation = Literal["none", "sigmoid", "softmax"]

Implementation = Literal["native", "transformers"]
"""Whose layers run: our own, or those of the architecture's class in transformers."""

Fp8 = Literal["", "rows", "blocks"]
"""How e4m3 matrices are scaled: by a number for each output, or for each block of 128 x 128; "": not e4m3."""

Int4Format = Literal["awq", "gptq", "gptq_v2", "pack-quantized"]
"""Format of the tensors that hold 4-bit weights. GPTQ's first format has zero points less 1."""

Held8 = Literal["", "int8"]
"""Whether matrices have 8-bit integers with a scale for each output (`gpu.quant.int8`)."""

RopeKind = Literal["none", "linear", "dynamic", "llama3", "yarn", "longrope"]

QkNorm = Literal["", "head", "all"]
"""RMSNorm of queries and of keys, before rope: over head_dim of each head, or over all heads of a token
together; "": none."""

Scores = Literal["softmax", "sigmoid"]
"""How experts are scored: over all of a layer's together, or each by itself."""

Norms = Literal["before", "behind", "both"]
"""Where attention and MLP are normed: what goes in, what comes out and joins the residual, or both."""


class Int4(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of 4-bit integers, w = (number - zero) x scale."""

    format: Int4Format
    group: int
    """Inputs that share a scale and a zero point; 0: all inputs of an output."""
    symmetric: bool = False
    """There are no zero points: they are 8."""
    plain: tuple[str, ...] = ()
    """Layers that are not quantised: of awq parts of their names, else whole names, or regular expressions
    behind "re:"."""
    renamed: tuple[str, str] = ("", "")
    """A part of names here, and what it is in `plain`, where a model has one layer of a checkpoint."""

    def has(self, name: str) -> bool:
        """Whether the layer of that name is quantised."""
        name = name.replace(*self.renamed)
        if self.format == "awq":
            return not any(each in name for each in self.plain)
        return not _ignored(name, self.plain)


class W8A8(msgspec.Struct, frozen=True, kw_only=True):
    """Matrices of 8-bit integers with a scale for each output, and products of them with rows of 8-bit
    integers that have a scale for each token."""

    plain: tuple[str, ...] = ()
    """Layers that are not quantised, as `Int4` has those of pack-quantized; it has `renamed`, too."""
    renamed: tuple[str, str] = ("", "")

    def has(self, name: str) -> bool:
        """Whether the layer of that name is quantised."""
        return not _ignored(name.replace(*self.renamed), self.plain)


def _ignored(name: str, plain: tuple[str, ...]) -> bool:
    """Whether a layer's name is one of `plain`, as compressed-tensors' `ignore` lists them: whole, or by
    regular expressions behind "re:"."""
    return any(
        re.match(each.removeprefix("re:"), name) if each.startswith("re:") else each == name for each in plain
    )


class RopeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Rotary embedding and how it is stretched. Fields a kind does not use keep their defaults."""

    theta: float = 10000.0
    kind: RopeKind = "none"
    factor: float = 1.0
    partial: float = 1.0
    """Share of head_dim, from its start, that is rotated."""
    original_max: int = 0
    """Positions of the unscaled model (dynamic, llama3, yarn, longrope, some linear ones)."""
    low_freq: float = 1.0
    high_freq: float = 4.0
    """llama3: wavelengths above original_max / low_freq are stretched fully, below
    original_max / high_freq not at all."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    """yarn: the ramp between kept and stretched dimensions, in rotations; whole dimensions or not."""
    attention_factor: float = 1.0
    """Scales cos and sin (yarn, longrope)."""
    short_factors: tuple[float, ...] = ()
    long_factors: tuple[float, ...] = ()
    scores_factor: float = 1.0
    """Factor of attention scores from `mscale_all_dim` (DeepSeek), for every kind of rope."""
    long: bool = False
    """longrope: what wavelengths are stretched by where no text is longer than `original_max`, and where some
    may be (`long`). Unlike in transformers a text that grows keeps one: cached keys would be wrong."""


class Mxfp4(msgspec.Struct, frozen=True, kw_only=True):
    """Experts' matrices of 4-bit floats (e2m1), of which each 32 inputs of an output share a power of two
    (e8m0): OCP Microscaling Formats 1.0."""

    plain: tuple[str, ...] = ()
    """Modules that are not quantised: regular expressions that match the beginnings of their names."""

    def has(self, name: str) -> bool:
        """Whether the module of that name is quantised."""
        return not any(re.match(each, name) for each in self.plain)


class ClampedGate(msgspec.Struct, frozen=True, kw_only=True):
    """gate · sigmoid(alpha · gate) · (up + 1), gates up to `limit`, ups from -limit to it."""

    alpha: float
    limit: float


Held = Fp8 | Int4 | Held8 | W8A8 | Literal["q4"]
"""Format of a matrix in memory: "" is the dtype of the computation, "q4" 4 bits on a CPU (`gpu.quant.q4`)."""


class MoeSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Routed experts."""

    experts: int
    per_token: int
    intermediate: int
    norm_topk: bool
    """The chosen experts' weights are scaled to sum to 1."""
    layers: frozenset[int]
    """Layers whose MLP is sparse; the others are dense with `ModelSpec.intermediate`."""
    shared: int = 0
    """Width of an expert that every token has too; 0: there is none."""
    bias: bool = False
    """Router and experts add biases."""
    clamped: ClampedGate | None = None
    """How gate and up are joined; None: activation(gate) · up."""
    stacked: bool = False
    """A checkpoint has the matrices of all experts in one tensor [experts, inputs, outputs], gate and up as
    every other output."""
    shared_gate: bool = True
    """The output of the shared expert is multiplied by a gate of its own."""
    scores: Scores = "softmax"
    """With "sigmoid" experts are chosen by their scores plus a bias that the checkpoint has, and weighed by
    their scores without it."""
    groups: int = 1
    top_groups: int = 1
    """A token's experts are of the best `top_groups` of so many groups of neighbours: those whose best expert
    is the best, or, with "sigmoid", whose best two are together."""
    scale: float = 1.0
    """Factor of the routed experts' weights (`routed_scaling_factor`)."""
    exact_router: bool = False
    """The router's logits are float32, and on a GPU sums that nothing has rounded before."""


class LatentSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Multi-head latent attention (MLA; DeepSeek-V2, arXiv 2405.04434). A token's keys and values are made of
    one latent of `kv_rank` numbers, and all heads share a rotated key of `rope_dim` beside it.

    Its `ModelSpec` describes attention over the latents: one KV head of kv_rank + rope_dim, the first kv_rank
    of which are the values."""

    kv_rank: int
    rope_dim: int
    nope_dim: int
    """Dimensions of a head's query and key without rope. They stand before the rotated ones."""
    value_dim: int
    """Dimensions of a head's values."""
    q_rank: int = 0
    """Queries are made of a normed vector of this size; 0: of the hidden state."""
    interleaved: bool = True
    """Neighbouring dimensions rotate together, not those half of `rope_dim` apart."""

    @property
    def query_dim(self) -> int:
        """Dimensions of a head's query, before it meets the latents."""
        return self.nope_dim + self.rope_dim


class LinearSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Linear attention by the gated delta rule (Gated DeltaNet, arXiv 2412.06464): layers that keep a state
    of a fixed size in place of keys and values."""

    layers: frozenset[int]
    key_heads: int
    value_heads: int
    """A multiple of `key_heads`: neighbours share a key head."""
    key_dim: int
    value_dim: int
    kernel: int
    """Tokens that the convolution before it sees, its own included."""
    mixed: bool = False
    """Checkpoints store q, k, v and z grouped by key head, instead of all q, then all k, and so on."""

    @property
    def key_size(self) -> int:
        return self.key_heads * self.key_dim

    @property
    def value_size(self) -> int:
        return self.value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """Channels of the convolution: queries, keys and values."""
        return 2 * self.key_size + self.value_size


class PoolingSpec(msgspec.Struct, frozen=True, kw_only=True):
    """How hidden states become one vector or scores."""

    kind: Pooling = "last"
    normalize: bool = True
    """Vectors are scaled to length 1."""
    labels: tuple[str, ...] = ()
    """Names of the classes, where the checkpoint has a head for them."""
    activation: Activation = "none"
    """Turns that head's logits into scores."""
    max_tokens: int = 0
    """Limit of an input, where it is below the number of positions; 0: none."""
    lowercase: bool = False
    """Whether texts are in lower case before they are tokenized."""


class EncoderSpec(msgspec.Struct, frozen=True, kw_only=True):
    """Facts of encoders only."""

    token_types: int
    first_position: int = 0
    """Row of the position table that a text's first token reads."""


class ModelSpec(msgspec.Struct, frozen=True, kw_only=True):
    """One language model: a decoder, or an encoder."""

    architecture: str
    vocab_size: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    activation: str = "silu"
    norm_eps: float = 1e-6
    tied: bool = False
    """The head is the embedding table."""
    rope: RopeSpec = RopeSpec()
    qkv_bias: bool = False
    out_bias: bool = False
    mlp_bias: bool = False
    qk_norm: QkNorm = ""
    norms: Norms = "before"
    norm_offset: float = 0.0
    """Safetensors hold norm weights less it. With one they are held in float32: in 16 bits the sum would lose
    what the checkpoint has behind it."""
    sliding_window: int = 0
    """Positions a token sees, itself included, in `window_layers`; 0: no such layers."""
    window_layers: frozenset[int] = frozenset()
    window_rope: RopeSpec | None = None
    """Rope of `window_layers`; None: `rope`, as of the others."""
    nope_layers: frozenset[int] = frozenset()
    """Layers whose queries and keys are not rotated (NoPE)."""
    table_scale: float = 1.0
    """What the table's embeddings are multiplied by, rounded to the model's dtype. Those of a request have it
    already."""
    embedding_scale: float = 1.0
    """What all embeddings are multiplied by."""
    residual_scale: float = 1.0
    """Factor of what attention and MLP add."""
    attention_scale: float = 0.0
    """Scores are multiplied by it; 0: by 1 / sqrt(head_dim)."""
    attention_cap: float = 0.0
    """Scores s become cap · tanh(s / cap) before the softmax; 0: they are left."""
    sinks: bool = False
    """Each query head has one more score in its softmax, learned, for a key without a value."""
    logits_scale: float = 1.0
    logits_cap: float = 0.0
    """Logits are capped as scores are by `attention_cap`; 0: they are left."""
    output_gate: bool = False
    """Attention outputs are multiplied by a sigmoid gate, which q_proj computes beside each head's query."""
    linear: LinearSpec | None = None
    """Linear attention of a hybrid model; its other layers attend."""
    moe: MoeSpec | None = None
    latent: LatentSpec | None = None
    """None: keys and values are held for each head."""
    encoder: EncoderSpec | None = None
    """None: tokens see only those before them."""
    task: Task = "generate"
    pooling: PoolingSpec = PoolingSpec()
    max_position: int
    more_layers: int = 0
    """Layers behind the last in a checkpoint, which predict further tokens (MTP) and are not read."""
    dtype: str = "float32"
    stored_fp8: Fp8 = ""
    """How the checkpoint's matrices are scaled if they are e4m3."""
    fp8: Fp8 = ""
    """How the layers' matrices, except routers, are held while serving: chosen by device, not read."""
    transformers: str = ""
    """The config.json of a model that runs through the class of its architecture in transformers; "": it runs
    by layers of our own."""
    parameters: int = 0
    """Counted parameters of a model that runs through transformers: `num_parameters`."""
    uncaptured: bool = False
    """Its forward waits for the device, so that no CUDA graph can hold it."""
    stored_int4: Int4 | None = None
    """How the checkpoint's matrices lie if they have 4 bits."""
    int4: Int4 | None = None
    """The layers' matrices that the checkpoint has in 4 bits stay so while serving; chosen as `fp8` is."""
    stored_w8a8: W8A8 | None = None
    """Which of the checkpoint's matrices are int8."""
    w8a8: W8A8 | None = None
    """The layers' matrices are int8 while serving; chosen as `fp8` is."""
    stored_mxfp4: Mxfp4 | None = None
    """How the checkpoint's experts lie if they are MXFP4."""
    mxfp4: Mxfp4 | None = None
    """As `int4`, for experts alone: the others are in the dtype of the computation."""
    stored_gguf: bool = False
    """The checkpoint is a .gguf file whose matrices are quantised, the tables among them."""
    int8: bool = False
    """Matrices that the checkpoint quantises are 8-bit integers while a CPU serves; chosen as `fp8` is."""
    q4_share: float = 0.0
    """Share of the weights that a .gguf file has in 4 bits; with `int8`, that are served in 4 bits."""
    ranks: int = 1
    """Ranks that divide each layer: heads, kv_heads and intermediate sizes are those of one (`shard`)."""
    kv_copies: int = 1
    """Neighbouring ranks that hold the same KV heads, where there are more ranks than KV heads."""

    @property
    def context_length(self) -> int:
        """Tokens a request may have: the trained positions, times what rope scaling adds, or `max_tokens`."""
        most = self.max_position
        if self.rope.kind in ("linear", "dynamic", "yarn"):
            most = max(most, int((self.rope.original_max or most) * self.rope.factor))
        return min(self.pooling.max_tokens or most, most)

    @property
    def implementation(self) -> Implementation:
        """Whether our layers run, or those of transformers."""
        return "transformers" if self.transformers else "native"

    @property
    def held(self) -> Held:
        """How the layers' matrices are held while serving."""
        return "int8" if self.int8 else self.int4 or self.eight_bits

    @property
    def held_tables(self) -> Held8:
        """The format of the head, as `held`. On a CPU with 8-bit matrices the embedding stays in its file."""
        return "int8" if self.int8 and self.stored_gguf else ""

    @property
    def eight_bits(self) -> Fp8 | W8A8:
        """How matrices and experts are held whose products take rows of 8 bits, too; "": they do not."""
        return self.w8a8 or self.fp8

    @property
    def causal(self) -> bool:
        """Tokens see only those before them."""
        return self.encoder is None

    @property
    def kv_layers(self) -> int:
        """Layers whose K and V outlive a step."""
        return self.layers - len(self.linear_layers) if self.causal else 0

    @property
    def linear_layers(self) -> frozenset[int]:
        """Layers that have a state in place of K and V."""
        return frozenset() if self.linear is None else self.linear.layers

    def place(self, layer: int) -> int:
        """The number of `layer` among those of its kind, which K and V or states are kept of."""
        kind = self.linear_layers
        return sum((each in kind) == (layer in kind) for each in range(layer))

    @property
    def softmax_scale(self) -> float:
        """What scores are multiplied by before the softmax."""
        return self.attention_scale or self.head_dim**-0.5

    @property
    def q_size(self) -> int:
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.kv_heads * self.head_dim

    @property
    def kv_shape(self) -> tuple[int, int, int]:
        """The shape of a layer's KV cache: KV heads, head_dim, and how many of a key's first columns are its
        value; 0: values lie beside keys, as wide."""
        return self.kv_heads, self.head_dim, self.latent.kv_rank if self.latent else 0

    @property
    def rope_dim(self) -> int:
        """Numbers of a head that rope is for, of which it may rotate a part."""
        return self.latent.rope_dim if self.latent else self.head_dim

    @property
    def vocab_rows(self) -> int:
        """Rows of the embedding and of the head that a rank has room for."""
        return -(-self.vocab_size // self.ranks)

    def shard(self, count: int) -> ModelSpec:
        """Spec of one of `count` ranks. Raises `ConfigError` with the sizes that `count` does not divide."""
        if count == 1:
            return self
        if not self.causal:
            raise ConfigError(f"--tp {count}: {self.architecture} is an encoder, which runs on one rank.")
        if self.transformers:
            raise ConfigError(f"--tp {count}: {self.architecture} runs through transformers: use --tp 1.")
        sizes = {"num_attention_heads": self.heads}
        if (linear := self.linear) is not None:
            sizes["linear_num_key_heads"] = linear.key_heads
            heads = {"key_heads": linear.key_heads // count, "value_heads": linear.value_heads // count}
            linear = msgspec.structs.replace(linear, **heads)
        if count % self.kv_heads:
            sizes["num_key_value_heads"] = self.kv_heads
        moe = self.moe
        if moe is None or len(moe.layers) < self.layers:
            sizes["intermediate_size"] = self.intermediate
        if moe is not None:
            sizes["moe_intermediate_size"] = moe.intermediate
            if moe.shared:
                sizes["shared_expert_intermediate_size"] = moe.shared
            widths = {"intermediate": moe.intermediate // count, "shared": moe.shared // count}
            moe = msgspec.structs.replace(moe, **widths)
        if odd := [f"{name} ({size})" for name, size in sizes.items() if size % count]:
            told, fits = f"{', '.join(odd)} of {self.architecture}", gcd(count, *sizes.values())
            raise ConfigError(f"--tp {count} does not divide {told}. Use --tp {fits}.")
        return msgspec.structs.replace(
            self,
            heads=self.heads // count,
            kv_heads=max(self.kv_heads // count, 1),
            intermediate=self.intermediate // count,
            moe=moe,
            linear=linear,
            ranks=count,
            kv_copies=max(count // self.kv_heads, 1),
        )

    def window(self, layer: int) -> int:
        """Positions that `layer` sees; 0: all."""
        return self.sliding_window if layer in self.window_layers else 0

    def table_parameters(self) -> int:
        """Parameters of `num_parameters` outside of layers: the embedding, positions, the head."""
        total = self.vocab_rows * self.hidden * (1 if self.tied or self.task != "generate" else 2)
        if self.encoder is not None:
            total += self.max_position * self.hidden
        return total

    def _attention_parameters(self) -> int:
        """Parameters of one layer's attention."""
        if (latent := self.latent) is None:
            return self.hidden * ((2 + self.output_gate) * self.q_size + 2 * self.kv_size)
        queries = self.heads * latent.query_dim
        made = latent.q_rank * (self.hidden + queries) if latent.q_rank else self.hidden * queries
        values = self.heads * latent.value_dim
        up = latent.kv_rank * (self.heads * latent.nope_dim + values)
        return made + self.hidden * (self.head_dim + values) + up

    def num_parameters(self) -> int:
        """Weights to hold, tied ones once. Biases and norms are left out: under 0.1%."""
        if self.parameters:
            return self.parameters
        total = self.table_parameters()
        attention = self._attention_parameters()
        for layer in range(self.layers):
            if self.linear is not None and layer in self.linear.layers:
                each = self.linear
                total += self.hidden * (each.channels + 2 * each.value_size + 2 * each.value_heads)
            else:
                total += attention
            if self.moe is not None and layer in self.moe.layers:
                total += self.moe.experts * self.hidden * (3 * self.moe.intermediate + 1)
                total += 3 * self.hidden * self.moe.shared
            else:
                total += (3 if self.causal else 2) * self.hidden * self.intermediate
        return total
