"""Where Triton kernels take the place of torch: one question, asked before each of them.

Does not know kernels. Source: own.
"""

from __future__ import annotations

from torch import Tensor


def uses_kernels(x: Tensor) -> bool:
    """True where x is on a CUDA device."""
    return bool(x.is_cuda)
