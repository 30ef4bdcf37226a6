"""Attention of grouped-query models on a CPU.

While one token a row is decoded, the query heads of a key head are given to attention as query
positions, so that no key or value is copied. Only models whose attention is plain are switched.

Does not know caches, rows or sampling. Source: grouped-query attention (Ainslie et al. 2023); the
packing is own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

_ATTENTION = "tfgrpo_grouped"


def use_grouped_attention(model: Any) -> bool:
    """Switch the model to `_grouped_attention` where its attention is plain; False elsewhere."""
    config = model.config
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",))
    is_plain = (
        kinds == {"full_attention"}
        and not getattr(config, "sliding_window", None)
        and not getattr(config, "attn_logit_softcapping", None)
        and config.model_type in ("llama", "qwen2", "qwen3", "smollm3", "mistral")
        and model.device.type == "cpu"
    )
    if not is_plain:
        return False
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    ALL_ATTENTION_FUNCTIONS.register(_ATTENTION, _grouped_attention)
    model.set_attn_implementation(_ATTENTION)
    return True


def _grouped_attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Attention for transformers' interface; `[B, H, T, D]` in, `[B, T, H, D]` out."""
    import torch.nn.functional as F

    rows, heads, steps, width = query.shape
    groups = key.shape[1]
    if steps == 1:
        packed = query.reshape(rows, groups, heads // groups, width)
        mask = attention_mask
        if mask is not None:
            mask = mask.expand(rows, 1, heads // groups, key.shape[2])
        out = F.scaled_dot_product_attention(packed, key, value, attn_mask=mask, scale=scaling)
        return out.reshape(rows, heads, 1, width).transpose(1, 2), None
    out = F.scaled_dot_product_attention(
        query,
        key,
        value,
        attn_mask=attention_mask,
        dropout_p=dropout,
        scale=scaling,
        is_causal=attention_mask is None,
        enable_gqa=heads != groups,
    )
    return out.transpose(1, 2).contiguous(), None
