"""Attention over a `Packed` micro-batch: every suffix sees its prompt and itself.

On CUDA in half precision one variable-length flash call, causal from the end, over keys in which
each suffix follows its prompt's again; only keys and values are repeated, nothing else is. Their
gradients are added up in a fixed order. Elsewhere one masked dense call a group.

Does not know models. Source: own; variable-length calls as in FlashAttention (arXiv 2307.08691).
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.model.packing import Packed

Three = tuple[Tensor, Tensor, Tensor]


def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, packed: Packed) -> Tensor:
    """Return the attention output, T × heads × head size; heads are a multiple of KV heads.

    Dense, in plain torch, differentiable.
    """
    pieces = []
    order = []
    for index, mask in packed.group_masks:
        qg, kg, vg = (x[index].transpose(0, 1).unsqueeze(0) for x in (q_THd, k_TKd, v_TKd))
        out = F.scaled_dot_product_attention(qg, kg, vg, attn_mask=mask, enable_gqa=True)
        pieces.append(out.squeeze(0).transpose(0, 1))
        order.append(index)
    inverse = torch.cat(order).argsort()
    return torch.cat(pieces)[inverse]


def attend_kept(
    q: Tensor, k: Tensor, v: Tensor, packed: Packed
) -> tuple[Tensor, tuple[Tensor, ...]]:
    """Return the output and what `attend_back` needs beside it; arguments contiguous."""
    if not _is_flash(q):
        return attend(q, k, v, packed).contiguous(), ()
    out, lse, seed, offset, _ = torch.ops.aten._flash_attention_forward(
        q, *_repeated(k, v, packed), *_bounds(packed), 0.0, True, False
    )
    return out, (lse, seed, offset)


def attend_back(
    d_out: Tensor, qkv: Three, out: Tensor, told: tuple[Tensor, ...], packed: Packed
) -> Three:
    """Return the gradients of queries, keys and values, contiguous.

    Args:
        d_out: T × heads × head size, contiguous.
        qkv: as given to `attend_kept`.
        out: its output.
        told: what it returned beside it.
        packed: the same.
    """
    q, k, v = qkv
    if not _is_flash(out):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in qkv)
            grads = torch.autograd.grad(attend(q, k, v, packed), (q, k, v), d_out)
        return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
    from tfgrpo.rl.kernels.update import sum_copies

    lse, seed, offset = told
    keys = _repeated(k, v, packed)
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out, q, *keys, out, lse, *_bounds(packed), 0.0, True, seed, offset
    )
    if keys[0] is k:
        return dq, dk, dv
    return dq, *sum_copies(dk, dv, packed.seen.order_K, packed.seen.start_T)


def _repeated(k: Tensor, v: Tensor, packed: Packed) -> tuple[Tensor, Tensor]:
    """Keys and values as every segment sees them: before each suffix its prompt's."""
    if packed.n_prompt == packed.n_tokens:
        return k, v
    return k[packed.seen.token_K], v[packed.seen.token_K]


def _bounds(packed: Packed) -> tuple[Tensor, Tensor, int, int]:
    return packed.cu_self, packed.cu_keys, packed.max_self, packed.max_keys


def _is_flash(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
