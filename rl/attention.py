"""Attention over a `Packed` micro-batch: every suffix sees its prompt and itself.

On CUDA in half precision two variable-length flash calls (segments among themselves; suffixes to
their prompt) are merged by their log-sum-exps, and the backward hands both calls the merged output
and log-sum-exp, which makes each one's gradient exact. Elsewhere one masked dense call a group.

Does not know models. Idea: block-wise attention with a shared softmax denominator, as in ring
attention (arXiv 2310.01889); its use for shared prompts is own.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.packing import Packed

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
    from tfgrpo.rl.triton_update import merge_into

    n = packed.n_prompt
    cu, longest = packed.cu_self, packed.max_self
    out, lse, *rng = torch.ops.aten._flash_attention_forward(
        q, k, v, cu, cu, longest, longest, 0.0, True, False
    )
    if packed.max_cross_q:
        cross, cross_lse, *_ = torch.ops.aten._flash_attention_forward(
            q[n:],
            k[:n],
            v[:n],
            packed.cu_cross_q,
            packed.cu_cross_k,
            packed.max_cross_q,
            packed.max_cross_k,
            0.0,
            False,
            False,
        )
        merge_into(out[n:], lse[:, n:], cross, cross_lse)
    return out, (lse, rng[0], rng[1])


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
    if not _is_flash(out):
        with torch.enable_grad():
            q, k, v = (x.detach().requires_grad_() for x in qkv)
            grads = torch.autograd.grad(attend(q, k, v, packed), (q, k, v), d_out)
        return grads[0].contiguous(), grads[1].contiguous(), grads[2].contiguous()
    q, k, v = qkv
    lse, seed, offset = told
    n = packed.n_prompt
    cu, longest = packed.cu_self, packed.max_self
    dq, dk, dv = torch.ops.aten._flash_attention_backward(
        d_out, q, k, v, out, lse, cu, cu, longest, longest, 0.0, True, seed, offset
    )
    if packed.max_cross_q:
        dq2, dk2, dv2 = torch.ops.aten._flash_attention_backward(
            d_out[n:],
            q[n:],
            k[:n],
            v[:n],
            out[n:],
            lse[:, n:].contiguous(),
            packed.cu_cross_q,
            packed.cu_cross_k,
            packed.max_cross_q,
            packed.max_cross_k,
            0.0,
            False,
            seed,
            offset,
        )
        dq[n:] += dq2
        dk[:n] += dk2
        dv[:n] += dv2
    return dq, dk, dv


def _is_flash(x: Tensor) -> bool:
    return x.is_cuda and x.dtype in (torch.bfloat16, torch.float16)
