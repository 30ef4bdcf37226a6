"""A Llama-like decoder with fused weights, shared by the trainer and the generator.

Query, key and value lie in one matrix, gate and up in another; the Hugging Face module's
parameters can be made views into them, so nothing is held twice and an update is a sync.
Families: Llama (SmolLM2 too), Mistral, Qwen2, Qwen3, without sliding windows.

Does not know losses, caches or sampling. Idea: fused projections with named views (own, after
what inference engines do).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tfgrpo.errors import ConfigError
from tfgrpo.rl.kernels import device
from tfgrpo.rl.model.attention import attend
from tfgrpo.rl.model.block_ops import gated, rms_norm, rotate, split_heads
from tfgrpo.rl.model.fused_block import BlockWeights, Scene, block_pass, block_values
from tfgrpo.rl.model.grad_buffers import embed
from tfgrpo.rl.model.packing import Packed
from tfgrpo.rl.model.shape import Shape, shape_of


class Block(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """One decoder layer."""

    def __init__(self, shape: Shape, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()

        def empty(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device))

        self.shape = shape
        self.norm1 = empty(shape.hidden)
        self.qkv = empty(shape.q_size + 2 * shape.kv_size, shape.hidden)
        self.qkv_bias = empty(shape.q_size + 2 * shape.kv_size) if shape.has_qkv_bias else None
        self.q_norm = empty(shape.head_dim) if shape.has_qk_norm else None
        self.k_norm = empty(shape.head_dim) if shape.has_qk_norm else None
        self.o = empty(shape.hidden, shape.q_size)
        self.norm2 = empty(shape.hidden)
        self.gate_up = empty(2 * shape.intermediate, shape.hidden)
        self.down = empty(shape.hidden, shape.intermediate)

    @property
    def qk_norms(self) -> tuple[Tensor, Tensor] | None:
        """Norms of queries and keys, where the family has them."""
        if self.q_norm is None or self.k_norm is None:
            return None
        return self.q_norm, self.k_norm

    def forward(
        self, x: Tensor, scene: Scene, keeps: bool = True
    ) -> tuple[Tensor, Tensor | None, Tensor | None]:
        """Return the block's output (T × hidden) and, in passes without gradients at least, its
        rotated keys and values; with `keeps` False, on CUDA, all is made again in the backward."""
        if not device.uses_kernels(x):
            return self._in_torch(x, scene)
        weights = BlockWeights(*(getattr(self, name) for name in BlockWeights._fields))
        if torch.is_grad_enabled():
            return block_pass(x, weights, scene, keeps=keeps), None, None
        return block_values(x, weights, scene)

    def _in_torch(self, x: Tensor, scene: Scene) -> tuple[Tensor, Tensor, Tensor]:
        eps = self.shape.eps
        fused = F.linear(rms_norm(x, self.norm1, eps), self.qkv, self.qkv_bias)
        q, k, v = split_heads(fused, self.shape)
        if self.qk_norms is not None:
            q, k = (rms_norm(h, w, eps) for h, w in zip((q, k), self.qk_norms))
        q, k = (rotate(h, scene.cos, scene.sin) for h in (q, k))
        x = torch.addmm(x, attend(q, k, v, scene.packed).flatten(-2), self.o.t())
        gate_up = F.linear(rms_norm(x, self.norm2, eps), self.gate_up)
        return torch.addmm(x, gated(gate_up), self.down.t()), k, v


class Decoder(nn.Module):  # type: ignore[misc]  # torch is untyped here
    """The whole model: packed token ids to final hidden states."""

    inv_freq: Tensor

    def __init__(
        self,
        shape: Shape,
        inv_freq: Tensor,
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
        rope_scale: float = 1.0,
    ) -> None:
        super().__init__()
        device = torch.device(device)

        def empty(*size: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(size, dtype=dtype, device=device))

        self.shape = shape
        self.rope_scale = rope_scale
        self.embed = empty(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Block(shape, dtype, device) for _ in range(shape.layers))
        self.norm = empty(shape.hidden)
        self.head = None if shape.is_tied else empty(shape.vocab, shape.hidden)
        self.register_buffer("inv_freq", inv_freq.to(device, torch.float32), persistent=False)
        self.checkpoint_blocks = False
        """Recompute each block's activations in the backward pass."""

    @property
    def head_weight(self) -> nn.Parameter:
        """The matrix from hidden states to logits, vocabulary × hidden."""
        return self.embed if self.head is None else self.head

    def angles(self, position: Tensor) -> tuple[Tensor, Tensor]:
        """Cosines and sines for positions of any shape: … × 1 × d/2 in float32."""
        angle = position[..., None, None].float() * self.inv_freq
        return angle.cos() * self.rope_scale, angle.sin() * self.rope_scale

    def forward(self, packed: Packed, *, keep_kv: bool = False) -> Any:
        """Return final hidden states, T × hidden; with `keep_kv`, which is for passes without
        gradients, also keys and values a layer."""
        scene = Scene(*self.angles(packed.position_T), packed, self.shape)
        x = embed(packed.ids_T, self.embed)
        kept = []
        for layer in self.layers:
            again = self.checkpoint_blocks and torch.is_grad_enabled()
            if again and not device.uses_kernels(x):
                x, k, v = checkpoint(layer, x, scene, use_reentrant=False, preserve_rng_state=False)
            else:
                x, k, v = layer(x, scene, keeps=not again)
            if keep_kv:
                kept.append((k, v))
        hidden = rms_norm(x, self.norm, self.shape.eps)
        return (hidden, kept) if keep_kv else hidden


def hf_slices(shape: Shape) -> Iterator[tuple[str, str, int, int]]:
    """Yield (Hugging Face name, our name, first row, row after the last) of every weight."""
    q, kv, mid = shape.q_size, shape.kv_size, shape.intermediate
    yield "model.embed_tokens.weight", "embed", 0, shape.vocab
    for i in range(shape.layers):
        theirs, ours = f"model.layers.{i}", f"layers.{i}"
        yield f"{theirs}.input_layernorm.weight", f"{ours}.norm1", 0, shape.hidden
        yield f"{theirs}.self_attn.q_proj.weight", f"{ours}.qkv", 0, q
        yield f"{theirs}.self_attn.k_proj.weight", f"{ours}.qkv", q, q + kv
        yield f"{theirs}.self_attn.v_proj.weight", f"{ours}.qkv", q + kv, q + 2 * kv
        if shape.has_qkv_bias:
            yield f"{theirs}.self_attn.q_proj.bias", f"{ours}.qkv_bias", 0, q
            yield f"{theirs}.self_attn.k_proj.bias", f"{ours}.qkv_bias", q, q + kv
            yield f"{theirs}.self_attn.v_proj.bias", f"{ours}.qkv_bias", q + kv, q + 2 * kv
        if shape.has_qk_norm:
            yield f"{theirs}.self_attn.q_norm.weight", f"{ours}.q_norm", 0, shape.head_dim
            yield f"{theirs}.self_attn.k_norm.weight", f"{ours}.k_norm", 0, shape.head_dim
        yield f"{theirs}.self_attn.o_proj.weight", f"{ours}.o", 0, shape.hidden
        yield f"{theirs}.post_attention_layernorm.weight", f"{ours}.norm2", 0, shape.hidden
        yield f"{theirs}.mlp.gate_proj.weight", f"{ours}.gate_up", 0, mid
        yield f"{theirs}.mlp.up_proj.weight", f"{ours}.gate_up", mid, 2 * mid
        yield f"{theirs}.mlp.down_proj.weight", f"{ours}.down", 0, shape.hidden
    yield "model.norm.weight", "norm", 0, shape.hidden
    if not shape.is_tied:
        yield "lm_head.weight", "head", 0, shape.vocab


def hf_views(decoder: Decoder) -> dict[str, Tensor]:
    """Return every weight under its Hugging Face name, as a view into the fused storage."""
    own = dict(decoder.named_parameters())
    return {
        theirs: own[ours].detach()[first:last]
        for theirs, ours, first, last in hf_slices(decoder.shape)
    }


def load_hf_weights(decoder: Decoder, weights: Mapping[str, Tensor]) -> None:
    """Copy weights given under Hugging Face names; every one must be there."""
    views = hf_views(decoder)
    missing = views.keys() - weights.keys()
    if missing:
        raise ConfigError(f"{len(missing)} weights are missing, such as {min(missing)!r}")
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(weights[name])


def decoder_from_hf(model: Any, *, share: bool = True) -> Decoder:
    """Build a decoder from a Hugging Face causal LM, on its device and in its type.

    With `share` the given module's parameters become views into the decoder's storage, so that the
    module stays usable and follows every update.
    """
    shape = shape_of(model.config)
    first = next(model.parameters())
    rope = model.model.rotary_emb
    decoder = Decoder(
        shape,
        rope.inv_freq,
        dtype=first.dtype,
        device=first.device,
        rope_scale=float(rope.attention_scaling),
    )
    theirs = dict(model.named_parameters())
    load_hf_weights(decoder, theirs)
    if share:
        for name, view in hf_views(decoder).items():
            theirs[name].data = view
    return decoder
