"""Sizes of a supported model family, read from a Hugging Face config.

Families: Llama (SmolLM2 too), Mistral, Qwen2, Qwen3, without sliding windows. Does not know
weights. Source: own.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from tfgrpo.errors import ConfigError

FAMILIES = ("llama", "mistral", "qwen2", "qwen3")


@dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a model."""

    family: str
    vocab: int
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    context: int
    """Longest sequence in tokens."""
    eps: float
    is_tied: bool
    has_qkv_bias: bool
    has_qk_norm: bool

    @property
    def q_size(self) -> int:
        """Rows of the query part of the fused matrix."""
        return self.heads * self.head_dim

    @property
    def kv_size(self) -> int:
        """Rows of the key part, and of the value part."""
        return self.kv_heads * self.head_dim


def why_unsupported(config: Any) -> str:
    """Return why a Hugging Face config is not one of the families, or an empty text."""
    kind = getattr(config, "model_type", "?")
    if kind not in FAMILIES:
        return f"model type {kind!r} is not one of {', '.join(FAMILIES)}"
    if kind == "llama" and (config.attention_bias or config.mlp_bias):
        return "biases in attention output or feed-forward layers"
    if kind in ("qwen2", "qwen3") and getattr(config, "use_sliding_window", False):
        return "sliding-window attention"
    if kind == "mistral" and getattr(config, "sliding_window", None):
        return "sliding-window attention"
    if kind == "qwen3" and config.attention_bias:
        return "attention biases in a qwen3 model"
    if config.hidden_act != "silu":
        return f"activation {config.hidden_act!r}"
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type", "default") not in ("default", "linear", "llama3"):
        return f"rope type {rope['rope_type']!r}"
    return ""


def shape_of(config: Any) -> Shape:
    """Read sizes from a Hugging Face config.

    Raises:
        ConfigError: the model is not of a supported family.
    """
    reason = why_unsupported(config)
    if reason:
        raise ConfigError(f"tfgrpo.rl cannot train this model: {reason}")
    heads = config.num_attention_heads
    return Shape(
        family=config.model_type,
        vocab=config.vocab_size,
        hidden=config.hidden_size,
        layers=config.num_hidden_layers,
        heads=heads,
        kv_heads=config.num_key_value_heads or heads,
        head_dim=getattr(config, "head_dim", None) or config.hidden_size // heads,
        intermediate=config.intermediate_size,
        context=config.max_position_embeddings,
        eps=config.rms_norm_eps,
        is_tied=bool(config.tie_word_embeddings),
        has_qkv_bias=config.model_type == "qwen2",
        has_qk_norm=config.model_type == "qwen3",
    )
