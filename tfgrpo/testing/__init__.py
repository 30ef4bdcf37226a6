"""What users and our own tests stand on: fake models, a server that misbehaves on demand, and
contract checks for classes that users write.

Does not know pytest. Nothing here needs a third-party module or the network.
"""

from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.testing.answers import (
    Answer,
    Call,
    choices,
    events,
    hang,
    raw,
    reset,
    say,
    status,
)
from tfgrpo.testing.contracts import check_lm, check_policy, check_scheduler, check_verifier
from tfgrpo.testing.executor_contract import check_executor
from tfgrpo.testing.fault_server import FaultServer
from tfgrpo.testing.more_contracts import (
    check_algorithm,
    check_allocator,
    check_environment,
    check_generator,
    check_recorder,
)
from tfgrpo.testing.replay import ReplayLM

__all__ = [
    "Answer",
    "Call",
    "FaultServer",
    "ReplayLM",
    "ScriptedLM",
    "check_algorithm",
    "check_allocator",
    "check_environment",
    "check_executor",
    "check_generator",
    "check_lm",
    "check_policy",
    "check_recorder",
    "check_scheduler",
    "check_verifier",
    "choices",
    "events",
    "hang",
    "raw",
    "reset",
    "say",
    "status",
]
