"""What stops a training run, or speaks up in it: tasks and parts that do not fit, a GPU that is
full, steps that move nothing.

Does not know how a step works. Source: own.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from tfgrpo.errors import ConfigError
from tfgrpo.execute.judging import is_group_verifier
from tfgrpo.protocols import Allocator, GrowingAllocator, HintScheduler, Verifier
from tfgrpo.rl import distributed
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.strategy_options import TURNS, refuse_beside
from tfgrpo.rl.update.given_rows import reference_text
from tfgrpo.rollout import Task

log = logging.getLogger(__name__)

_TOLD_EVERY = 5
"""Steps in a row that moved nothing, before that is told."""


@contextmanager
def explain_out_of_memory(step: int, settings: str) -> Iterator[None]:
    """Turn a GPU that is full into one line with the settings to lower."""
    try:
        yield
    except torch.cuda.OutOfMemoryError as exc:
        torch.cuda.empty_cache()
        raise ConfigError(
            f"step {step}: the GPU's memory is used up; lower {settings}; "
            "the last checkpoint is whole"
        ) from exc


class Determinism:
    """Ask torch for equal bits in equal runs while a block runs."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and torch.cuda.is_available()

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        if self._wanted:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before)


def check_tasks(
    tasks: Sequence[Task], held_out: Sequence[Task], verifier: Verifier, config: TrainConfig
) -> None:
    """Refuse tasks that a run cannot train on or be judged by.

    Raises:
        ConfigError: naming them.
    """
    if not tasks:
        raise ConfigError("there are no training tasks: set tasks.path")
    seen = {t.task_id for t in tasks}
    if len(seen) != len(tasks):
        raise ConfigError("training tasks repeat a task_id: every task needs an id of its own")
    both = sorted(seen & {t.task_id for t in held_out})
    if both:
        raise ConfigError(
            f"{len(both)} held-out tasks are training tasks too, such as {both[0]!r}: take them out"
        )
    world = distributed.world()[1]
    if min(config.rollout.tasks_per_step, len(tasks)) < world:
        raise ConfigError(f"{world} processes need at least as many tasks a step")
    for task in (*tasks, *held_out):
        verifier.check_task(task)
    if "given" in LOSSES[config.loss.name].needs:
        for task in tasks:
            reference_text(task)


def check_parts(
    config: TrainConfig,
    verifier: Verifier,
    hints: HintScheduler | None,
    allocate: Allocator | None,
    *,
    has_own_groups: bool,
) -> None:
    """Refuse parts of a run that contradict each other, or a run of several processes.

    Raises:
        ConfigError: naming them.
    """
    strategy = config.rollout.strategy
    if strategy != "plain":
        refuse_beside(
            f"rollout.strategy {strategy!r}",
            {
                "a hint scheduler": hints is not None,
                "make_groups": has_own_groups,
                "an allocator": allocate is not None,
            },
        )
    mixing = {
        "curriculum.allocate lets groups grow": isinstance(allocate, GrowingAllocator),
        "curriculum.refill adds rollouts of earlier groups": bool(config.curriculum.refill),
        "rollout.strategy 'spo_chain' compares rewards of several sets": strategy == "spo_chain",
    }
    for what, is_set in mixing.items():
        if is_set and is_group_verifier(verifier):
            raise ConfigError(
                f"{what}, and the verifier scores the rollouts of a group against each other: "
                "such scores change with it; use another of the two"
            )
    world = distributed.world()[1]
    one_process = {
        "[hints]": hints is not None,
        f"rollout.strategy {strategy!r}": strategy in TURNS,
        "curriculum.replay, refill or select, or rollout.strategy 'april'": config.reuses,
    }
    for name, is_set in one_process.items():
        if is_set and world > 1:
            raise ConfigError(
                f"{name} with {world} processes: one process keeps the state; train on one, or "
                "leave it out"
            )


class FlatSteps:
    """Counts the steps in a row that moved nothing, and tells of them at the fifth, the tenth, the
    twentieth…"""

    def __init__(self) -> None:
        self._flat = 0

    def count(self, step: int, figures: Mapping[str, Any], *, is_flat: bool, tells: bool) -> None:
        """Take in a step, from 1, and its figures."""
        self._flat = self._flat + 1 if is_flat else 0
        fives, rest = divmod(self._flat, _TOLD_EVERY)
        if not tells or rest or not fives or fives & (fives - 1):
            return
        cause = (
            "although rewards differ: [loss], [credit] or [rewards] make nothing of them, such as "
            "an option that no reward reaches. Look at their options"
            if figures["informative_share"]
            else "because the rewards within every group are equal. Take tasks that succeed now "
            "and then (curriculum.band), look at the verifier, or raise rollout.group_size or "
            "rollout.max_tokens"
        )
        log.warning(
            "step %d: %d steps in a row have moved no weight (mean reward %.3g; %.0f %% of the "
            "replies were cut), %s; Ctrl-C ends the run, its last checkpoint is whole",
            step,
            self._flat,
            figures["reward_mean"],
            100 * figures["truncated_share"],
            cause,
        )
