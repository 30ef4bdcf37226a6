"""Metrics of each step: one JSON line per step, and further sinks.

Does not know losses. Source: own.
"""

from __future__ import annotations

import json
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from tfgrpo.errors import MissingExtraError
from tfgrpo.rl import distributed
from tfgrpo.rollout import Rollout, RolloutGroup

if TYPE_CHECKING:
    from tfgrpo.protocols import HintScheduler
    from tfgrpo.rl.generation.requests import Counters
    from tfgrpo.rl.rollouts.figures import RolloutFigures
    from tfgrpo.rl.update.updater import UpdateReport

from tfgrpo.runtime.texts.text_lines import numbered_lines

log = logging.getLogger(__name__)

Sink = Callable[[int, Mapping[str, float]], None]


class MetricsLog:
    """`metrics.jsonl` of a run and further sinks; a sink that fails is warned of once and left.

    Args:
        path: the file; lines after `resume_step` are dropped, so that a resumed run has each once.
        resume_step: steps that the checkpoint holds.
        sinks: called with (step, numbers).
    """

    def __init__(self, path: Path, resume_step: int, sinks: Mapping[str, Sink]) -> None:
        self._path = path
        self._sinks = dict(sinks)
        path.parent.mkdir(parents=True, exist_ok=True)
        kept = []
        if path.exists():
            for number, line, is_whole in numbered_lines(path.read_text(encoding="utf-8")):
                if not is_whole and not line.endswith("}"):
                    log.warning("%s: line %d is cut off and left out", path, number)
                elif json.loads(line)["step"] <= resume_step:
                    kept.append(line)
        path.write_text("".join(line + "\n" for line in kept), encoding="utf-8")

    def write(self, step: int, row: Mapping[str, Any]) -> None:
        """Append one line; numbers that are not finite are written as null."""
        clean = {
            k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in row.items()
        }
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps({"step": step, **clean}, allow_nan=False) + "\n")
        numbers = {k: float(v) for k, v in clean.items() if isinstance(v, (int, float))}
        for name, sink in list(self._sinks.items()):
            try:
                sink(step, numbers)
            except (OSError, RuntimeError, ValueError) as exc:
                log.warning("metrics sink %s failed and is left out from here on: %s", name, exc)
                del self._sinks[name]


def tensorboard_sink(folder: Path) -> Sink:
    """Return a sink that writes TensorBoard scalars."""
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as exc:
        raise MissingExtraError.of("rl", "run.tensorboard", "tensorboard") from exc
    writer = SummaryWriter(str(folder))  # type: ignore[no-untyped-call,unused-ignore]

    def sink(step: int, row: Mapping[str, float]) -> None:
        for name, value in row.items():
            writer.add_scalar(name, value, step)  # type: ignore[no-untyped-call,unused-ignore]
        writer.flush()  # type: ignore[no-untyped-call,unused-ignore]

    return sink


def tracker_sink(kind: str, project: str, config: Mapping[str, Any]) -> Sink:
    """Return a sink for Weights & Biases or trackio, which share one interface."""
    try:
        if kind == "wandb":
            import wandb as tracker
        else:
            import trackio as tracker  # type: ignore[no-redef,import-not-found,unused-ignore]
    except ImportError as exc:
        raise MissingExtraError(
            f"run.tracker = {kind!r} needs the package {kind!r}: pip install {kind}"
        ) from exc
    run = tracker.init(project=project, config=dict(config))

    def sink(step: int, row: Mapping[str, float]) -> None:
        del step
        run.log(dict(row))

    return sink


def group_figures(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    """Rewards, outcomes and lengths of a step's groups, those of all processes."""
    mine = [(g.rewards_G, g.is_informative(), [_facts(r) for r in g.rollouts]) for g in groups]
    everyone = [group for part in distributed.gather_objects(mine) for group in part]
    rewards = [x for rewards_G, *_ in everyone for x in rewards_G]
    rollouts = [r for *_, facts in everyone for r in facts]
    lengths = [r["length"] for r in rollouts]
    played = [r for r in rollouts if "turns" in r]
    names = ("turns", "tool_calls", "invalid_actions") if played else ()
    turns = {f"{name}_mean": float(np.mean([r[name] for r in played])) for name in names}
    return turns | {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "informative_share": sum(is_mixed for _, is_mixed, _ in everyone) / max(1, len(everyone)),
        "graded_share": len(rewards) / max(1, len(rollouts)),
        "truncated_share": sum(r["is_truncated"] for r in rollouts) / max(1, len(rollouts)),
        "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        "length_max": max(lengths, default=0),
    }


def _facts(rollout: Rollout) -> dict[str, int]:
    """What `group_figures` counts of a rollout; of one that was played, its turns too."""
    found = {
        "length": sum(len(s.token_ids or ()) for s in rollout.steps),
        "is_truncated": int(rollout.is_truncated),
    }
    if "tool_calls" in rollout.metadata:
        played = {n: rollout.metadata.get(n, 0) for n in ("tool_calls", "invalid_actions")}
        found |= {"turns": len(rollout.steps), **played}
    return found


def rollout_figures(
    made: RolloutFigures, counters: Counters, hints: HintScheduler | None = None
) -> dict[str, Any]:
    """What making a step's groups cost, and where the run's hints stand."""
    return {
        "prompt_tokens": made.prompt_tokens,
        "completion_tokens": made.completion_tokens,
        "rollouts": made.rollouts,
        "hinted_rollouts": made.hinted_rollouts,
        "hints_too_long": made.hints_too_long,
        **_write_figures(made),
        **({"value_rollouts": made.value_rollouts} if made.value_rollouts else {}),
        "decode_steps": counters.steps,
        "decode_row_steps": counters.row_steps,
        "verify_seconds": made.verify_seconds,
        **{f"groups_{level}": count for level, count in made.levels.items()},
        **{f"hints_{k}": v for k, v in (hints.figures() if hints else {}).items()},
    }


def _write_figures(made: RolloutFigures) -> dict[str, int]:
    """Texts that the policy was asked for; nothing where there were none."""
    if not made.writes:
        return {}
    return {
        "writes": made.writes,
        "writes_unread": made.writes_unread,
        "write_tokens": made.write_tokens,
    }


def update_figures(done: UpdateReport, *, with_entropy: bool) -> dict[str, Any]:
    """What the optimiser batches of a step did; loss and entropy are of all processes."""
    results = done.results
    trained = sum(r.trained_tokens for r in results)
    mine = (sum(r.loss for r in results), sum(r.entropy_sum for r in results), trained)
    losses, entropies, tokens = zip(*distributed.gather_objects(mine), strict=True)
    figures: dict[str, Any] = {
        "loss": sum(losses) / len(losses),
        "grad_norm": max(done.norms, default=0.0),
        "trained_tokens": trained,
        "input_tokens": sum(r.input_tokens for r in results),
        "skipped_tokens": sum(r.skipped_tokens for r in results),
        "prompt_tokens_saved": sum(r.prompt_tokens_saved for r in results),
        "score_seconds": done.score_seconds,
    }
    if done.mismatch is not None:
        figures |= {
            "mismatch_mean": done.mismatch.mean_abs,
            "mismatch_row": done.mismatch.max_row,
        }
    if with_entropy:
        figures["entropy"] = sum(entropies) / max(1, sum(tokens))
    return figures
