"""What a run will ask for, before anything is spent: calls, tokens and money a stage.

Rollout counts run from what happens where nothing is proposed to an exact upper bound; critic
calls from none (no group teaches) to all groups teaching, re-asked replies aside. Tokens of prompts
are measured on the bare prompts, replies run from a short answer to the token limit.
Without a known price the money is unknown, never 0. The row `nudge` holds all extra rollouts of
failed tasks, those of the recheck included.

Does not know: how calls are made. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from tfgrpo.config import Config
from tfgrpo.context import render_messages
from tfgrpo.rollout import Task
from tfgrpo.statistics import min_detectable

_MESSAGE_OVERHEAD = 4
_DEFAULT_REPLY = 512
_CRITIC_PROMPT = 1500
_CRITIC_REPLY = 400


@dataclass(frozen=True, slots=True)
class StageForecast:
    """One stage's range; tokens are totals, `cost_usd` is None where no price is known."""

    stage: str
    calls_low: int
    calls_high: int
    prompt_tokens: int
    completion_low: int
    completion_high: int
    cost_low_usd: float | None
    cost_high_usd: float | None


@dataclass(frozen=True, slots=True)
class Forecast:
    """The stages in order, and what the test split could show."""

    stages: tuple[StageForecast, ...]
    min_detectable: float | None
    """Smallest true difference that the test split finds with 80 % power; None without one."""
    notes: tuple[str, ...]

    @property
    def calls_high(self) -> int:
        """Calls at most."""
        return sum(s.calls_high for s in self.stages)

    @property
    def cost_high_usd(self) -> float | None:
        """Money at most, or None where a price is unknown."""
        costs = [s.cost_high_usd for s in self.stages]
        return None if any(c is None for c in costs) else math.fsum(c for c in costs if c)

    def to_dict(self) -> dict[str, Any]:
        """Return the JSON form."""
        return asdict(self)

    def lines(self) -> list[str]:
        """Return a table for people, and the notes."""
        rows = [
            f"{'stage':<10}{'calls':>16}{'prompt tokens':>16}{'reply tokens':>20}{'cost $':>18}"
        ]
        for s in self.stages:
            cost = (
                "unknown"
                if s.cost_high_usd is None
                else f"{s.cost_low_usd:.4f} to {s.cost_high_usd:.4f}"
            )
            rows.append(
                f"{s.stage:<10}{f'{s.calls_low} to {s.calls_high}':>16}{f'≈{s.prompt_tokens}':>16}"
                f"{f'≈{s.completion_low} to {s.completion_high}':>20}{cost:>18}"
            )
        return [*rows, *self.notes]


Price = tuple[float, float]
"""Dollars per million input and output tokens."""


def estimate_tokens(text: str) -> int:
    """Return about how many tokens a text has: a quarter of its UTF-8 bytes (approximation)."""
    return math.ceil(len(text.encode("utf-8", "surrogatepass")) / 4)


def forecast(
    config: Config,
    practice: Sequence[Task],
    gate: Sequence[Task],
    test: Sequence[Task],
    *,
    policy_price: Price | None = None,
    critic_price: Price | None = None,
) -> Forecast:
    """Return the range of what `learn` will ask for with these splits."""
    learn, gates = config.learn, config.gate
    steps = learn.epochs * math.ceil(len(practice) / learn.batch) if practice else 0
    groups = learn.epochs * len(practice)
    arms = {"both": 3, "lessons": 1, "exemplars": 1}[learn.entries] + gates.retry_single_edits
    draws = learn.epochs * learn.group_size
    stages = [_rollouts("practice", config, practice, (draws, draws), policy_price)]
    extra = learn.epochs * nudge_rollouts(config, len(practice))
    if extra:
        stages.append(_nudges(config, practice, extra, policy_price))
    if config.nudge.asks_lm:
        price = policy_price if config.nudge.writer == "policy" else critic_price
        stages.append(_critic("nudge_text", len(practice), config, price))
    if learn.entries != "exemplars":
        parts = config.nudge.contexts if config.nudge.kind == "strategies" else 1
        calls = groups * (learn.group_size + 2 * parts) + steps + extra
        stages.append(_critic("critic", calls, config, critic_price))
    if gates.enabled and gate:
        looks = steps * arms + (1 if learn.top_k else 0)
        size = gates.group_size
        stages.append(_rollouts("gate", config, gate, (size, size * (1 + looks)), policy_price))
    if test:
        size = gates.test_group_size
        stages.append(_rollouts("test", config, test, (size, 2 * size), policy_price))
    smallest = min_detectable(len(test), gates.test_group_size) if len(test) > 1 else None
    return Forecast(tuple(stages), smallest, tuple(_notes(config, stages, smallest, len(test))))


def nudge_rollouts(config: Config, n_practice: int) -> int:
    """Return the most extra rollouts of an epoch: each step's cap, or all its tasks failing."""
    nudge, learn = config.nudge, config.learn
    if nudge.kind == "off":
        return 0
    each = nudge.most_rollouts(learn.group_size)
    total = 0
    for start in range(0, n_practice, learn.batch):
        size = min(learn.batch, n_practice - start)
        most = nudge.cap(size * learn.group_size)
        total += most if each is None else min(most, size * (each + nudge.recheck_rollouts))
    return total


def _nudges(
    config: Config, practice: Sequence[Task], rollouts: int, price: Price | None
) -> StageForecast:
    """Return the range of the extra rollouts; what help adds to a prompt is not known yet."""
    whole = _rollouts("nudge", config, practice, (0, 1), price)
    share = rollouts / len(practice)
    return _stage(
        "nudge",
        0,
        round(share * whole.calls_high),
        math.ceil(share * whole.prompt_tokens),
        0,
        round(share * whole.completion_high),
        price,
    )


def _rollouts(
    stage: str, config: Config, tasks: Sequence[Task], draws: tuple[int, int], price: Price | None
) -> StageForecast:
    """Return a stage's range for (least, most) draws a task."""
    policy = config.policy
    prompts = 0
    for task in tasks:
        messages = render_messages(task.messages, system=policy.system)
        prompts += sum(estimate_tokens(m.content) + _MESSAGE_OVERHEAD for m in messages)
    low, high = (n * len(tasks) for n in draws)
    limit = policy.sampling.max_tokens or _DEFAULT_REPLY
    high *= policy.max_steps if policy.kind == "tools" else 1
    return _stage(stage, low, high, prompts * draws[1], 8 * low, limit * high, price)


def _critic(stage: str, calls: int, config: Config, price: Price | None) -> StageForecast:
    limit = config.critic.sampling.max_tokens or _CRITIC_REPLY
    return _stage(stage, 0, calls, _CRITIC_PROMPT * calls, 0, limit * calls, price)


def _stage(
    stage: str,
    calls_low: int,
    calls_high: int,
    prompt_tokens: int,
    completion_low: int,
    completion_high: int,
    price: Price | None,
) -> StageForecast:
    low = high = None
    if price is not None:
        share = calls_low / calls_high if calls_high else 0.0
        low = (share * prompt_tokens * price[0] + completion_low * price[1]) / 1e6
        high = (prompt_tokens * price[0] + completion_high * price[1]) / 1e6
    return StageForecast(
        stage, calls_low, calls_high, prompt_tokens, completion_low, completion_high, low, high
    )


def _notes(
    config: Config, stages: Sequence[StageForecast], smallest: float | None, n_test: int
) -> list[str]:
    notes = []
    total = sum(s.calls_high for s in stages)
    cap = config.budget.calls
    if cap is not None and cap < total:
        steps_share = cap / total
        notes.append(
            f"the cap of {cap} calls covers about {steps_share:.0%} of the most this can take"
        )
    if any(s.cost_high_usd is None for s in stages):
        notes.append("no price is known for a model of this run: set run.prices, or cap the calls")
    if smallest is None:
        notes.append("no test split: nothing will be proven")
    else:
        notes.append(
            f"{n_test} test tasks x {config.gate.test_group_size} draws find a true difference of "
            f"{smallest:.3f} with 80 % power (worst case)"
        )
    return notes
