"""Where rollouts run: the protocol of an executor, this process, and how an attempt is judged.

Other places (worker processes, a Ray cluster) are in `tfgrpo.workers`. Does not know tasks' order,
recording or money.
"""

from tfgrpo.execute.local import LocalExecutor
from tfgrpo.execute.protocol import Executor, Unit, UnitSettings

__all__ = ["Executor", "LocalExecutor", "Unit", "UnitSettings"]
