"""What a Llama-like model looks like, read from config.json or from GGUF metadata. Knows no tensor and no torch."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from guidevane_runtime.errors import BrokenModel, UnsupportedModel

SUPPORTED_ARCHITECTURES = ("LlamaForCausalLM",)
SUPPORTED_GGUF_ARCHITECTURES = ("llama",)


@dataclass(frozen=True, slots=True)
class Llama3RopeScaling:
    """Stretches low frequencies only: wavelengths above original_max_len / low_freq_factor (as Llama 3.1 does)."""

    factor: float
    low_freq_factor: float
    high_freq_factor: float
    original_max_len: int


@dataclass(frozen=True, slots=True)
class LinearRopeScaling:
    """Stretches all frequencies by `factor` (position interpolation, arXiv:2306.15595)."""

    factor: float


RopeScaling = Llama3RopeScaling | LinearRopeScaling


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shapes and constants of one Llama-like decoder."""

    architecture: str
    """LlamaForCausalLM, whichever format it came from."""
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_norm_eps: float
    rope_theta: float
    max_model_len: int
    """Tokens of context that the model was made for."""
    tie_word_embeddings: bool
    rope_scaling: RopeScaling | None = None
    eos_token_ids: frozenset[int] = frozenset()

    @property
    def attention_scale(self) -> float:
        return float(self.head_dim**-0.5)

    @property
    def qkv_size(self) -> int:
        """Rows of the fused q, k and v projection."""
        return (self.num_heads + 2 * self.num_kv_heads) * self.head_dim

    @classmethod
    def from_hf(cls, raw: Mapping[str, Any], generation: Mapping[str, Any], source: str) -> "ModelConfig":
        """Read config.json, and generation_config.json for what ends a text. `source` names the file in errors."""
        read = _Fields(raw, source)
        architecture = _hf_architecture(raw, source)
        _refuse_hf_features(raw, source)
        num_heads, hidden_size = read.integer("num_attention_heads"), read.integer("hidden_size")
        rope = _hf_rope(raw)
        return cls(
            architecture=architecture,
            vocab_size=read.integer("vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=read.integer("intermediate_size"),
            num_layers=read.integer("num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=read.integer("num_key_value_heads", num_heads),
            head_dim=read.integer("head_dim", hidden_size // num_heads),
            rms_norm_eps=read.number("rms_norm_eps", 1e-6),
            rope_theta=_Fields(rope, source).number("rope_theta", read.number("rope_theta", 10000.0)),
            max_model_len=read.integer("max_position_embeddings", 2048),
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            rope_scaling=_hf_rope_scaling(rope, source),
            eos_token_ids=_ids(generation.get("eos_token_id")) or _ids(raw.get("eos_token_id")),
        ).checked(source)

    @classmethod
    def from_gguf(cls, raw: Mapping[str, Any], *, tied: bool, source: str) -> "ModelConfig":
        """Read GGUF metadata (key -> value); `tied`: the file has no output.weight."""
        architecture = raw.get("general.architecture")
        if architecture not in SUPPORTED_GGUF_ARCHITECTURES:
            raise UnsupportedModel(
                f"{source}: general.architecture is {architecture!r}; this runtime computes "
                f"{', '.join(SUPPORTED_GGUF_ARCHITECTURES)}"
            )
        read = _Fields(raw, source, f"{architecture}.")
        _refuse_gguf_features(raw, source)
        num_heads, hidden_size = read.integer("attention.head_count"), read.integer("embedding_length")
        head_dim = read.integer("attention.key_length", hidden_size // num_heads)
        rope_dim = read.integer("rope.dimension_count", head_dim)
        if rope_dim != head_dim:
            raise UnsupportedModel(
                f"{source}: llama.rope.dimension_count is {rope_dim}, the head has {head_dim} dimensions; "
                "partial rotary embeddings are not supported"
            )
        return cls(
            architecture=SUPPORTED_ARCHITECTURES[0],
            vocab_size=read.integer("vocab_size", len(raw.get("tokenizer.ggml.tokens", ()))),
            hidden_size=hidden_size,
            intermediate_size=read.integer("feed_forward_length"),
            num_layers=read.integer("block_count"),
            num_heads=num_heads,
            num_kv_heads=read.integer("attention.head_count_kv", num_heads),
            head_dim=head_dim,
            rms_norm_eps=read.number("attention.layer_norm_rms_epsilon"),
            rope_theta=read.number("rope.freq_base", 10000.0),
            max_model_len=read.integer("context_length"),
            tie_word_embeddings=tied,
            rope_scaling=_gguf_rope_scaling(raw, source),
            eos_token_ids=frozenset().union(*(_ids(raw.get(f"tokenizer.ggml.{name}_token_id")) for name in GGUF_ENDS)),
        ).checked(source)

    def checked(self, source: str) -> "ModelConfig":
        """Refuse what contradicts itself, before memory is taken for it."""
        for name in ("vocab_size", "hidden_size", "intermediate_size", "num_layers", "num_heads", "num_kv_heads"):
            if getattr(self, name) < 1:
                raise BrokenModel(f"{source}: {name} is {getattr(self, name)}, it must be at least 1")
        if self.num_heads % self.num_kv_heads:
            raise BrokenModel(
                f"{source}: {self.num_heads} attention heads can't share {self.num_kv_heads} key/value heads evenly"
            )
        for token_id in self.eos_token_ids:
            if not 0 <= token_id < self.vocab_size:
                raise BrokenModel(f"{source}: token {token_id} ends a text, the model has 0 to {self.vocab_size - 1}")
        if self.head_dim < 2 or self.head_dim % 2:
            raise BrokenModel(f"{source}: head_dim is {self.head_dim}; rotary embeddings need an even one")
        return self


GGUF_ENDS = ("eos", "eot", "eom")
"""tokenizer.ggml.<name>_token_id that end an answer."""


class _Fields:
    """Typed reads of a metadata mapping, with errors that name file and field."""

    def __init__(self, raw: Mapping[str, Any], source: str, prefix: str = "") -> None:
        self._raw, self._source, self._prefix = raw, source, prefix

    def integer(self, name: str, default: int | None = None) -> int:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int):
            raise BrokenModel(f"{self._source}: {self._prefix}{name} is {value!r}, an integer is needed")
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._value(name, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise BrokenModel(f"{self._source}: {self._prefix}{name} is {value!r}, a number is needed")
        return float(value)

    def _value(self, name: str, default: float | None) -> object:
        value = self._raw.get(self._prefix + name)
        if value is None and default is None:
            raise BrokenModel(f"{self._source}: {self._prefix}{name} is missing")
        return default if value is None else value


def _hf_architecture(raw: Mapping[str, Any], source: str) -> str:
    named = raw.get("architectures") or []
    if not named and raw.get("model_type") == "llama":
        return SUPPORTED_ARCHITECTURES[0]
    for architecture in named:
        if architecture in SUPPORTED_ARCHITECTURES:
            return str(architecture)
    raise UnsupportedModel(
        f"{source}: architectures is {named!r} (model_type {raw.get('model_type')!r}); this runtime computes "
        f"{', '.join(SUPPORTED_ARCHITECTURES)}"
    )


def _refuse_hf_features(raw: Mapping[str, Any], source: str) -> None:
    for name in ("attention_bias", "mlp_bias"):
        if raw.get(name):
            raise UnsupportedModel(f"{source}: {name} is true; Llama models with biases are not supported")
    activation = raw.get("hidden_act", "silu")
    if activation != "silu":
        raise UnsupportedModel(f"{source}: hidden_act is {activation!r}; only silu is supported")
    if raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method")
        raise UnsupportedModel(
            f"{source}: quantization_config is set (quant_method {method!r}); "
            "load the unquantised weights or a GGUF file"
        )
    if raw.get("partial_rotary_factor", 1.0) != 1.0:
        factor = raw["partial_rotary_factor"]
        raise UnsupportedModel(f"{source}: partial_rotary_factor is {factor}; only 1.0 is supported")


def _hf_rope(raw: Mapping[str, Any]) -> Mapping[str, Any]:
    """Find the block: rope_parameters, theta inside, since transformers 5; before, rope_scaling beside rope_theta."""
    return raw.get("rope_parameters") or raw.get("rope_scaling") or {}


def _hf_rope_scaling(rope: Mapping[str, Any], source: str) -> RopeScaling | None:
    read = _Fields(rope, source, "")
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind == "default":
        return None
    if kind == "linear":
        return LinearRopeScaling(read.number("factor"))
    if kind == "llama3":
        return Llama3RopeScaling(
            factor=read.number("factor"),
            low_freq_factor=read.number("low_freq_factor"),
            high_freq_factor=read.number("high_freq_factor"),
            original_max_len=read.integer("original_max_position_embeddings"),
        )
    raise UnsupportedModel(f"{source}: rope_type is {kind!r}; default, linear and llama3 are supported")


def _refuse_gguf_features(raw: Mapping[str, Any], source: str) -> None:
    experts = raw.get("llama.expert_count", 0)
    if experts:
        raise UnsupportedModel(f"{source}: llama.expert_count is {experts}; mixtures of experts are not supported")
    window = raw.get("llama.attention.sliding_window", 0)
    if window:
        raise UnsupportedModel(
            f"{source}: llama.attention.sliding_window is {window}; sliding windows are not supported"
        )


def _gguf_rope_scaling(raw: Mapping[str, Any], source: str) -> RopeScaling | None:
    """Llama 3's scaling is no metadata in a GGUF: it comes as the tensor rope_freqs.weight."""
    kind = raw.get("llama.rope.scaling.type", "none")
    factor = raw.get("llama.rope.scaling.factor", raw.get("llama.rope.scale_linear", 1.0))
    if kind == "linear" or (kind == "none" and "llama.rope.scale_linear" in raw):
        return None if factor in (0, 1) else LinearRopeScaling(float(factor))
    if kind != "none":
        raise UnsupportedModel(f"{source}: llama.rope.scaling.type is {kind!r}; none and linear are supported")
    return None


def _ids(value: object) -> frozenset[int]:
    if isinstance(value, int) and not isinstance(value, bool):
        return frozenset((value,))
    if isinstance(value, list | tuple):
        return frozenset(int(item) for item in value)
    return frozenset()
