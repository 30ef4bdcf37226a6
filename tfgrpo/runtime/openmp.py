"""How OpenMP's threads wait for each other, before torch starts them.

Does not import torch, which reads the settings as it is loaded. Source: libgomp's manual
(OMP_WAIT_POLICY, GOMP_SPINCOUNT).
"""

from __future__ import annotations

import os
from collections.abc import MutableMapping

SPINS = 10_000
"""Looks of a waiting thread of libgomp before it sleeps: some tenths of a millisecond (0.2 on a
Xeon), longer than from one of a decoding step's operations to the next, shorter than a time slice
of the scheduler."""


def bound_waiting(environ: MutableMapping[str, str] = os.environ) -> None:
    """Let threads that wait spin for a moment and then sleep, unless the user has chosen.

    Threads that sleep at once are woken for each operation, which takes a third of a small model's
    speed; ones that spin on take a core from other programs, beside which a step can last ten times
    as long.
    """
    if not environ.get("OMP_WAIT_POLICY"):
        environ["GOMP_SPINCOUNT"] = environ.get("GOMP_SPINCOUNT") or str(SPINS)
        environ["OMP_WAIT_POLICY"] = "PASSIVE"
