"""The steps of decoding, each with a Triton kernel on CUDA and a plain torch form elsewhere.

Does not know models as wholes, nor how rows are scheduled. Idea: few launches a layer, since a
small model's decode step is bound by their number (own measurements; rl.md, section 4).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.generation.counter_rng import pick
from tfgrpo.rl.kernels import device
from tfgrpo.rl.model.block_ops import gated, rms_norm, rotate, split_heads

if TYPE_CHECKING:
    from tfgrpo.rl.model.shape import Shape


MEMBERS = 8
"""Most rows that read one copy of a prompt."""


@dataclass(slots=True)
class Slots:
    """State of all decode rows, on the device. Axes: B slots, N new tokens at most."""

    token: Tensor
    """Last token of each row, int64: B."""
    position: Tensor
    """Where it stands, int32: B."""
    count: Tensor
    """Tokens made so far, int32: B."""
    limit: Tensor
    """Tokens wanted at most, int32: B."""
    alive: Tensor
    """1 while the row decodes, int32: B."""
    inv_temperature: Tensor
    """float32: B; 0 is greedy."""
    uniform: Tensor
    """Numbers to draw with, float64: B × N."""
    out_token: Tensor
    """int64: B × N."""
    out_logp: Tensor
    """float32: B × N."""
    eos: Tensor
    """Token ids that end a row, int64; padded with -1."""
    home: Tensor
    """Slot whose copy of the prompt's keys and values a row reads, int32: B; its own holds the
    same, but what several rows read comes from a GPU's cache."""
    shared: Tensor
    """Tokens that it reads there, int32: B."""
    members: Tensor
    """Rows whose home a slot is, int32: B × `MEMBERS`; padded with -1."""

    @classmethod
    def empty(cls, rows: int, new: int, n_eos: int, device: torch.device) -> Slots:
        """Allocate idle slots."""

        def zeros(dtype: torch.dtype, *size: int) -> Tensor:
            return torch.zeros(size, dtype=dtype, device=device)

        return cls(
            token=zeros(torch.int64, rows),
            position=zeros(torch.int32, rows),
            count=zeros(torch.int32, rows),
            limit=zeros(torch.int32, rows),
            alive=zeros(torch.int32, rows),
            inv_temperature=zeros(torch.float32, rows),
            uniform=zeros(torch.float64, rows, new),
            out_token=zeros(torch.int64, rows, new),
            out_logp=zeros(torch.float32, rows, new),
            eos=torch.full((max(1, n_eos),), -1, dtype=torch.int64, device=device),
            home=torch.arange(rows, dtype=torch.int32, device=device),
            shared=zeros(torch.int32, rows),
            members=torch.full((rows, MEMBERS), -1, dtype=torch.int32, device=device),
        )

    def per_row(self) -> list[Tensor]:
        """Everything that moves with a row; where its prompt is read does not."""
        return [
            self.token,
            self.position,
            self.count,
            self.limit,
            self.alive,
            self.inv_temperature,
            self.uniform,
            self.out_token,
            self.out_logp,
        ]


def add_rms_norm(x: Tensor, delta: Tensor | None, weight: Tensor, eps: float) -> Tensor:
    """Add `delta`, in parts or whole, to `x` in place and return the normed, scaled rows."""
    if device.uses_kernels(x):
        return _triton().add_rms_norm(x, delta, weight, eps)
    if delta is not None:
        x += delta
    return F.rms_norm(x, x.shape[-1:], weight, eps)


def long_product(x: Tensor, weight: Tensor) -> Tensor:
    """Return x · weightᵀ, R × out, or on CUDA a stack of parts of it in float32, P × R × out.

    Few outputs of long sums leave most of a GPU idle unless the sums are cut.
    """
    rows, length = x.shape
    wide = length >= 2 * len(weight) and length % 2 == 0
    if not (device.uses_kernels(x) and x.dtype == torch.bfloat16 and wide):
        return F.linear(x, weight)
    halves = (x.view(rows, 2, -1).transpose(0, 1), weight.view(len(weight), 2, -1).permute(1, 2, 0))
    return torch.bmm(*halves, out_dtype=torch.float32)


def silu_mul(gate_up: Tensor) -> Tensor:
    """Return silu of the first half times the second half."""
    if device.uses_kernels(gate_up):
        return _triton().silu_mul(gate_up)
    return gated(gate_up)


def decode_attention(
    qkv: Tensor,
    layer_cache: tuple[Tensor, Tensor],
    slots: Slots,
    angles: tuple[Tensor, Tensor],
    qk_norms: tuple[Tensor, Tensor] | None,
    shape: Shape,
    mask: Tensor | None,
    parts: int = 0,
) -> Tensor:
    """Rotate, append to the cache, attend over the row so far: R × (heads · d).

    Args:
        qkv: fused projections of R rows.
        layer_cache: this layer's keys and values, B × KV heads × T × d; position of each row
            written.
        slots: tells each row's position, and where its prompt is read on CUDA.
        angles: tables of cosines and sines, T × d/2.
        qk_norms: query and key norm weights where the family has them.
        mask: (torch form only) R × 1 × 1 × T', true where a row may look.
        parts: (on CUDA only) in how many parts long prompts are read, see `Cache.prompt_parts`.
    """
    k_cache, v_cache = layer_cache
    if device.uses_kernels(qkv):
        return _triton().decode_attention(
            qkv, k_cache, v_cache, slots, angles, qk_norms, shape, parts
        )
    n = len(qkv)
    q, k, v = split_heads(qkv, shape)
    if qk_norms is not None:
        q, k = rms_norm(q, qk_norms[0], shape.eps), rms_norm(k, qk_norms[1], shape.eps)
    position = slots.position[:n].long()
    cos, sin = (table[position][:, None] for table in angles)
    rows = torch.arange(n)
    k_cache[rows, :, position] = rotate(k, cos, sin)
    v_cache[rows, :, position] = v
    assert mask is not None
    longest = mask.shape[-1]
    out = F.scaled_dot_product_attention(
        rotate(q, cos, sin).view(n, shape.kv_heads, -1, shape.head_dim),
        k_cache[:n, :, :longest],
        v_cache[:n, :, :longest],
        attn_mask=mask,
    )
    return out.reshape(n, -1)


def pick_and_advance(logits: Tensor, slots: Slots, top_p: float) -> None:
    """Draw each living row's next token and move the row on; finished rows stand still."""
    if device.uses_kernels(logits) and top_p >= 1:
        _triton().pick_and_advance(logits, slots)
        return
    n = len(logits)
    alive = slots.alive[:n].bool()
    count = slots.count[:n].long()
    at = count.clamp_max(slots.uniform.shape[1] - 1)[:, None]
    token, logp = pick(
        logits, slots.uniform[:n].gather(1, at).squeeze(1), slots.inv_temperature[:n], top_p
    )
    for out, value in ((slots.out_token, token), (slots.out_logp, logp)):
        kept = torch.where(alive, value, out[:n].gather(1, at).squeeze(1))
        out[:n].scatter_(1, at, kept[:, None])
    slots.token[:n] = torch.where(alive, token, slots.token[:n])
    slots.count[:n] += slots.alive[:n]
    slots.position[:n] += slots.alive[:n]
    ended = (token[:, None] == slots.eos).any(-1) | (slots.count[:n] >= slots.limit[:n])
    slots.alive[:n] *= (~ended).to(torch.int32)


def _triton() -> Any:
    from tfgrpo.rl.kernels import decode as triton_kernels

    return triton_kernels
