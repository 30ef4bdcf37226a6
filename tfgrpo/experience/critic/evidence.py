"""Rollouts as text for a critic: fenced as data, cut to size without losing the interesting parts.

A cut text keeps its head, its tail and the lines around errors between them, with a mark for what
is missing, and is never longer than asked. Does not know prompts, models, the library.
Idea: head/tail cutting as in log viewers; random data marks against injection (own).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from itertools import pairwise

from tfgrpo.experience.draft import TokenCounter
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.rollout import Rollout, RolloutGroup
from tfgrpo.runtime.canonical import digest

_ERROR = re.compile(
    r"error|exception|traceback|fail(?:ed|ure)|denied|not found|timed? ?out|invalid|错误|异常|失败",
    re.IGNORECASE,
)
_ERROR_WINDOW = 160
_MAX_ERROR_WINDOWS = 8
_MARK = "\n[... {n} characters left out ...]\n"


def fence(text: str, *, seed: int = 0, label: str = "") -> str:
    """Return text between marks that whoever wrote the text could not know.

    The mark is a hash over the text and the run's seed, so that an equal request stays an equal
    request (cache, resume) and no text can hold its own mark. `label` tells equal texts of one
    prompt apart.
    """
    salt = 0
    while True:
        mark = digest([seed, salt, label, text.encode("utf-8", "replace").decode()], 12)
        if mark not in text:
            return f"<<data {mark}>>\n{text}\n<<end {mark}>>"
        salt += 1


def data_block(text: str, settings: ExperienceSettings, label: str = "") -> str:
    """Return a record for a prompt, fenced where the settings say so."""
    if not settings.repairs.fenced_data:
        return text
    return fence(text, seed=settings.seed, label=label)


def trajectory(rollout: Rollout) -> str:
    """Return what happened in a rollout, one paragraph an action or observation."""
    blocks: list[str] = []
    for i, step in enumerate(rollout.steps, 1):
        head = f"step {i}, " if len(rollout.steps) > 1 else ""
        if step.action.content:
            blocks.append(f"{head}agent: {step.action.content}")
        blocks.extend(f"{head}call: {c.name}({c.arguments})" for c in step.action.tool_calls)
        blocks.extend(f"{head}result: {m.content}" for m in step.observations)
    if rollout.is_truncated:
        blocks.append("(the agent's reply reached its length limit here)")
    return "\n".join(blocks)


def fitted_trajectory(rollout: Rollout, max_tokens: int, count: TokenCounter) -> str:
    """Return the trajectory within a limit; a single huge observation is cut before the whole."""
    whole = trajectory(rollout)
    if len(whole) <= 4 * max_tokens and count(whole) <= max_tokens:
        return whole
    share = max(60, max_tokens // 4)
    blocks = [cut(block, share, count) for block in whole.split("\nstep ")]
    return cut("\nstep ".join(blocks), max_tokens, count)


def cut(text: str, max_tokens: int, count: TokenCounter) -> str:
    """Return `text` in at most `max_tokens` tokens.

    >>> cut("abc", 100, len)
    'abc'
    >>> len(cut("x" * 1000, 100, len)) <= 100
    True
    """
    if len(text) <= 50_000_000 and count(text) <= max_tokens:
        return text
    size = len(text)
    budget = min(size, max_tokens * 4)
    while budget > 0:
        piece = _pieces(text, budget)
        if count(piece) <= max_tokens:
            return piece
        budget = int(budget * 0.85) if budget > 8 else budget - 1
    return ""


def _pieces(text: str, budget: int) -> str:
    """Return head, error lines and tail of `budget` characters in all, marks not counted."""
    head_end = int(budget * 0.4)
    tail_start = len(text) - int(budget * 0.4)
    if tail_start <= head_end:
        return text
    spans = [(0, head_end)]
    room = budget - 2 * int(budget * 0.4)
    for match in _ERROR.finditer(text, head_end, tail_start):
        start = max(spans[-1][1], match.start() - _ERROR_WINDOW // 2)
        end = min(match.end() + _ERROR_WINDOW // 2, tail_start, start + room)
        if end <= start:
            continue
        room -= end - start
        spans.append((start, end))
        if room <= 0 or len(spans) > _MAX_ERROR_WINDOWS:
            break
    spans.append((tail_start, len(text)))
    out = [text[: spans[0][1]]]
    for (_, end), (start, stop) in pairwise(spans):
        out.append(_MARK.format(n=start - end) if start > end else "")
        out.append(text[start:stop])
    return "".join(out)


def advantages(group: RolloutGroup) -> dict[str, float]:
    """Return reward minus the group's mean for each graded rollout, by rollout id."""
    mean = group.mean_reward or 0.0
    return {r.rollout_id: r.reward - mean for r in group.graded if r.reward is not None}


def extremes(rollouts: Sequence[Rollout], limit: int) -> list[Rollout]:
    """Return at most `limit` rollouts in their order: the best and the worst by turns."""
    if len(rollouts) <= limit:
        return list(rollouts)
    ranked = sorted(rollouts, key=lambda r: (-(r.reward or 0.0), r.sample_index))
    order = [ranked[i // 2] if i % 2 == 0 else ranked[-1 - i // 2] for i in range(len(ranked))]
    chosen = {r.rollout_id for r in order[:limit]}
    return [r for r in rollouts if r.rollout_id in chosen]


def fits(build: Callable[[int], str], max_tokens: int, count: TokenCounter, first: int) -> str:
    """Return `build(share)` for the largest tried share of tokens whose text fits.

    Args:
        build: makes the whole prompt, giving each variable part `share` tokens.
        max_tokens: limit of the whole prompt.
        count: tokens of a text.
        first: the share to try first.
    """
    share = first
    while share > 16:
        prompt = build(share)
        if count(prompt) <= max_tokens:
            return prompt
        share = int(share * 0.7)
    return cut(build(16), max_tokens, count)
