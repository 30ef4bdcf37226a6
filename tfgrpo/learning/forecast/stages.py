"""What a run will ask for, before anything is spent: calls, tokens and money a stage.

Calls run from one for each group, where a model draws a group in one call and nothing is proposed,
to an exact upper bound; critic calls from none (no group teaches) to all groups teaching, re-asked
replies aside. Tokens of prompts run from the bare prompts to prompts with a library at its caps,
replies from a short answer to the token limit. A tool attempt sends what was said before again with
each step; observations are counted as 512 tokens each (approximation). Without a known price the
money is unknown, never 0. The row `nudge` holds all extra rollouts of failed tasks, those of the
recheck included; what help adds to a prompt is not known before it is written.

Does not know: how calls are made. Source: own.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from tfgrpo.config.learn import Config
from tfgrpo.context import render_messages
from tfgrpo.experience.reflect.panels import panel_size
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.learning.forecast.power import keepable_gain, power_notes, power_warnings
from tfgrpo.learning.forecast.record import Forecast, StageForecast
from tfgrpo.learning.forecast.times import with_times
from tfgrpo.rollout import Task
from tfgrpo.runtime.token_estimates import quarter_of
from tfgrpo.statistics import min_detectable

_MESSAGE_OVERHEAD = 4
_DEFAULT_REPLY = 512
_CRITIC_PROMPT = 1500
_CRITIC_REPLY = 400
_OBSERVATION = 512
_PANEL_FIXED = 3000
"""Most tokens of a panel's fixed text and the agent's instructions (approximation)."""
_FRAME = 40
"""Tokens of the words around lessons."""
_TOKENS_A_WORD = 2


Price = tuple[float, float]
"""Dollars per million input and output tokens."""


def text_tokens(text: str) -> int:
    """Return about how many tokens a text has."""
    return quarter_of(len(text.encode("utf-8", "surrogatepass")))


def library_tokens(settings: ExperienceSettings, groups: int, longest: int, reply: int) -> int:
    """Return the most tokens that a library adds to a prompt.

    Args:
        settings: caps, kinds of entries and their sizes.
        groups: groups that may teach.
        longest: tokens of the longest task.
        reply: limit of a reply, which an exemplar shows.
    """
    lessons = groups * settings.lessons_per_group if settings.lessons else 0
    words = settings.max_words * _TOKENS_A_WORD
    if settings.lessons and settings.flow == "reflect":
        lessons, words = groups * settings.reflect.rules, settings.reflect.entry_tokens
    exemplars = min(settings.exemplars, groups)
    caps = settings.caps if settings.repairs.bounded_library else None
    if caps is not None and caps.entries is not None:
        lessons = min(lessons, caps.entries)
    tokens = lessons * (words + _MESSAGE_OVERHEAD)
    tokens += exemplars * (longest + reply + 2 * _MESSAGE_OVERHEAD)
    if caps is not None and caps.tokens is not None:
        tokens = min(tokens, caps.tokens)
    return tokens + _FRAME


def forecast(
    config: Config,
    practice: Sequence[Task],
    gate: Sequence[Task],
    test: Sequence[Task],
    settings: ExperienceSettings | None = None,
    *,
    policy_price: Price | None = None,
    critic_price: Price | None = None,
) -> Forecast:
    """Return the range of what `learn` will ask for with these splits.

    Args:
        settings: how groups become edits; the default ones when None.
    """
    learn, gates = config.learn, config.gate
    is_own = config.policy.kind == "function"
    policy_price = None if is_own else policy_price  # nobody sees what the function calls
    steps = learn.epochs * math.ceil(len(practice) / learn.batch) if practice else 0
    groups = learn.epochs * len(practice)
    longest = max((_prompt_tokens(config, [t]) for t in practice), default=0)
    made = settings or ExperienceSettings()
    library = library_tokens(made, groups, longest, _reply_limit(config))
    reflects = made.flow == "reflect" and made.lessons
    arms = {"both": 3, "lessons": 1, "exemplars": 1}[learn.entries] + gates.retry_single_edits
    arms += 2 if reflects else 0  # rewritten topics, two versions united
    draws = learn.epochs * learn.group_size
    # A pass ends early where the gate leaves nothing to gain; later passes draw what still fails.
    least = learn.group_size if made.flow == "reflect" else draws
    # The first step's groups are made before there is anything to show.
    informed = (groups - min(learn.batch, len(practice))) * learn.group_size * library
    stages = [_rollouts("practice", config, practice, (least, draws), informed, policy_price)]
    if made.flow == "reflect" and 0 < learn.batch < len(practice):
        shortest = sorted(practice, key=lambda t: _prompt_tokens(config, [t]))[: learn.batch]
        first = _rollouts("practice", config, shortest, (least, least), 0, policy_price)
        stages[0] = _with_least(stages[0], first)
    if reflects and practice:
        stages += _reflecting(config, made, practice, steps, library, policy_price, critic_price)
    extra = learn.epochs * nudge_rollouts(config, len(practice))
    if extra:
        stages.append(_nudges(config, practice, extra, library, policy_price))
    if config.nudge.asks_lm:
        price = policy_price if config.nudge.writer == "policy" else critic_price
        stages.append(_critic("nudge_text", len(practice), config, price))
    if learn.entries != "exemplars" and not reflects:
        parts = config.nudge.contexts if config.nudge.kind == "strategies" else 1
        calls = groups * (learn.group_size + 2 * parts) + steps + extra
        stages.append(_critic("critic", calls, config, critic_price))
    if gates.enabled and gate:
        looks = steps * arms + (1 if learn.top_k else 0)
        size = gates.group_size
        most, shown = (size, size * (1 + looks)), size * looks * len(gate) * library
        stages.append(_rollouts("gate", config, gate, most, shown, policy_price))
    if test:
        size = gates.test_group_size
        shown = size * len(test) * library
        stages.append(_rollouts("test", config, test, (size, 2 * size), shown, policy_price))
    smallest = min_detectable(len(test), gates.test_group_size) if len(test) > 1 else None
    stages = [with_times(s, config, is_own=is_own) for s in stages]
    keepable = keepable_gain(config, len(gate))
    notes = [
        *_notes(config, stages, is_own),
        *power_notes(config, len(gate), keepable, len(test), smallest),
    ]
    warnings = power_warnings(config, (len(practice), len(gate), len(test)))
    return Forecast(tuple(stages), smallest, tuple(notes), keepable, tuple(warnings))


def _with_least(stage: StageForecast, least: StageForecast) -> StageForecast:
    """Return a stage with the low ends of another."""
    return replace(
        stage,
        calls_low=least.calls_low,
        prompt_low=least.prompt_low,
        completion_low=least.completion_low,
        cost_low_usd=least.cost_low_usd,
    )


def _reflecting(
    config: Config,
    settings: ExperienceSettings,
    practice: Sequence[Task],
    steps: int,
    library: int,
    policy_price: Price | None,
    critic_price: Price | None,
) -> list[StageForecast]:
    """Return the range of replays and of the critic's panels, revisions and rewrites."""
    sizes, budget = settings.reflect, settings.budget
    reply = max(1, min(budget.reply_tokens, budget.context_tokens // 4))
    limit = max(budget.context_tokens - 2 * reply, budget.context_tokens // 4)
    most = panel_size(max(0, limit - _PANEL_FIXED - library), sizes.panel_groups)
    room = max(1, most - min(sizes.counter_evidence, most // 2))
    panels = math.ceil(min(config.learn.batch, len(practice)) / room)
    entries = settings.caps.entries or panels * sizes.rules
    rewrites = entries // sizes.crowded if sizes.crowded else 0
    calls = steps * (panels + 1 + rewrites)
    longest = max(_prompt_tokens(config, [t]) for t in practice)
    group = longest + config.learn.group_size * _reply_limit(config)
    lines = min(sizes.other_tasks, len(practice)) * (longest + _reply_limit(config))
    prompt = min(limit, _CRITIC_PROMPT + library + most * group + lines)
    stages = []
    if sizes.replays and settings.ground_truth:
        rolled = 2 * steps * sizes.replays
        whole = _rollouts("replay", config, practice, (0, 1), library * len(practice), policy_price)
        stages.append(_part(whole, rolled / len(practice), policy_price))
    completion = config.critic.sampling.max_tokens or _CRITIC_REPLY
    stages.append(
        _stage("critic", (0, calls), (0, prompt * calls), (0, completion * calls), critic_price)
    )
    return stages


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
    config: Config, practice: Sequence[Task], rollouts: int, library: int, price: Price | None
) -> StageForecast:
    """Return the range of the extra rollouts, none of which may be needed."""
    whole = _rollouts("nudge", config, practice, (0, 1), library * len(practice), price)
    return _part(whole, rollouts / len(practice), price)


def _part(whole: StageForecast, share: float, price: Price | None) -> StageForecast:
    """Return a stage of which none may be needed, as a multiple of one draw a task."""
    return _stage(
        whole.stage,
        (0, round(share * whole.calls_high)),
        (0, math.ceil(share * whole.prompt_high)),
        (0, round(share * whole.completion_high)),
        price,
    )


def _reply_limit(config: Config) -> int:
    return config.policy.sampling.max_tokens or _DEFAULT_REPLY


def _prompt_tokens(config: Config, tasks: Sequence[Task]) -> int:
    """Return the tokens of the tasks' bare prompts, one draw each."""
    system = config.policy.system
    return sum(
        text_tokens(m.content) + _MESSAGE_OVERHEAD
        for task in tasks
        for m in render_messages(task.messages, system=system)
    )


def _rollouts(
    stage: str,
    config: Config,
    tasks: Sequence[Task],
    draws: tuple[int, int],
    shown: int,
    price: Price | None,
) -> StageForecast:
    """Return a stage's range for (least, most) draws a task.

    Args:
        shown: most tokens of libraries over the first prompts of all its attempts.
    """
    policy = config.policy
    prompts = _prompt_tokens(config, tasks)
    low, high = (n * len(tasks) for n in draws)
    limit = _reply_limit(config)
    steps = policy.max_steps if policy.kind == "tools" else 1
    # A chat model may draw a whole group in one call, and is then sent its prompt once.
    fewest = min(1, draws[0]) if policy.kind == "chat" else draws[0]
    again = steps * (steps - 1) // 2 * (limit + _OBSERVATION + 2 * _MESSAGE_OVERHEAD)
    return _stage(
        stage,
        (fewest * len(tasks), high * steps),
        (prompts * fewest, steps * (prompts * draws[1] + shown) + again * high),
        (8 * low, limit * high * steps),
        price,
    )


def _critic(stage: str, calls: int, config: Config, price: Price | None) -> StageForecast:
    limit = config.critic.sampling.max_tokens or _CRITIC_REPLY
    return _stage(stage, (0, calls), (0, _CRITIC_PROMPT * calls), (0, limit * calls), price)


def _stage(
    stage: str,
    calls: tuple[int, int],
    prompt: tuple[int, int],
    completion: tuple[int, int],
    price: Price | None,
) -> StageForecast:
    low = high = None
    if price is not None:
        low, high = (
            (p * price[0] + c * price[1]) / 1e6 for p, c in zip(prompt, completion, strict=True)
        )
    return StageForecast(stage, *calls, *prompt, *completion, low, high)


def _notes(config: Config, stages: Sequence[StageForecast], is_own: bool) -> list[str]:
    notes = []
    total = sum(s.calls_high for s in stages)
    cap = config.budget.calls
    if cap is not None and cap < total:
        notes.append(
            f"the cap of {cap} calls covers about {cap / total:.0%} of the most this can take"
        )
    if is_own:
        notes.append(
            "the agent's own calls, tokens and money are not seen: each attempt counts as one "
            "call, and what it returns as `Rollout.usage` counts as it says"
        )
    elif any(s.cost_high_usd is None for s in stages):
        notes.append("no price is known for a model of this run: set run.prices, or cap the calls")
    return notes
