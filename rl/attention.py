"""Attention over a `Packed` micro-batch: every suffix sees its prompt and itself.

On CUDA in half precision two variable-length flash calls (segments among themselves; suffixes to
their prompt) are merged by their log-sum-exps, and the backward hands both calls the merged output
and log-sum-exp, which makes each one's gradient exact. Elsewhere one masked dense call a group.

Does not know models. Idea: block-wise attention with a shared softmax denominator, as in ring
attention (arXiv 2310.01889); its use for shared prompts is own.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tfgrpo.rl.packing import Packed


def attend(q_THd: Tensor, k_TKd: Tensor, v_TKd: Tensor, packed: Packed) -> Tensor:
    """Return the attention output, T × heads × head size; heads are a multiple of KV heads."""
    if q_THd.is_cuda and q_THd.dtype in (torch.bfloat16, torch.float16):
        out: Tensor = _SharedPromptFlash.apply(q_THd, k_TKd, v_TKd, packed)
        return out
    return _attend_dense(q_THd, k_TKd, v_TKd, packed)


def _attend_dense(q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
    pieces = []
    order = []
    for index, mask in packed.group_masks:
        qg, kg, vg = (x[index].transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        out = F.scaled_dot_product_attention(qg, kg, vg, attn_mask=mask, enable_gqa=True)
        pieces.append(out.squeeze(0).transpose(0, 1))
        order.append(index)
    inverse = torch.cat(order).argsort()
    return torch.cat(pieces)[inverse]


class _SharedPromptFlash(torch.autograd.Function):  # type: ignore[misc]  # torch is untyped
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, packed: Packed) -> Tensor:
        from tfgrpo.rl.triton_update import merge_into

        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
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
        ctx.save_for_backward(q, k, v, out, lse, rng[0], rng[1])
        ctx.packed = packed
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor, Tensor, None]:
        q, k, v, out, lse, seed, offset = ctx.saved_tensors
        packed: Packed = ctx.packed
        d_out = grads[0].contiguous()
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
        return dq, dk, dv, None
