"""What to do after a run: what kept it from keeping anything, then the levers, each with a command.

Does not know how causes are found or levers are ranked. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tfgrpo.diagnosis import Reason
from tfgrpo.report.advise import Advice, advise
from tfgrpo.report.view import RunView

__all__ = ["advise_on"]


def advise_on(
    view: RunView, *, why: Sequence[Reason] | None = None, level: float = 0.90, seed: int = 0
) -> list[Advice]:
    """Return why nothing was kept as the advice that comes first, then one for each lever.

    Args:
        why: the view's reasons, where they were found already.
    """
    run, config = view.folder or view.name, view.config_path
    epochs = (view.config.get("learn") or {}).get("epochs") or 1
    commands = {
        "experience": f"tfgrpo learn {config} --fork --set learn.epochs={epochs + 1}",
        "hints": f"tfgrpo learn {config} --fork --set nudge.kind=hints --set nudge.writer=critic",
        "routing": f"tfgrpo learn {config} --set policy.lm=OTHER --set run.folder=runs/other",
        "rl": f"tfgrpo escalate {run} --dry-run",
    }
    levers = advise(view.figures, level=level, seed=seed)
    setup = [_setup(reason, config) for reason in (view.why_not_kept() if why is None else why)]
    return setup + [replace(a, command=commands.get(a.lever, "")) for a in levers]


def _setup(reason: Reason, config: str) -> Advice:
    is_kept = reason.cause == "small_test"
    return Advice(
        "setup",
        reason.text if is_kept else f"nothing was kept: {reason.text}",
        reason.remedy,
        "measured",
        None,
        "one more run; what was paid is used again",
        None,
        reason.command(config),
    )
