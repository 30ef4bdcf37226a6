"""Groups out of traffic: explicit identity, one context, whole sessions."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tfgrpo.context import Context, ContextPart
from tfgrpo.serve.learning.grouping import CapturedRequest, make_groups, read_turns
from tfgrpo.serve.learning.ratings import Rating
from tfgrpo.serve.settings import GroupSettings

SETTINGS = GroupSettings(size=2, idle_s=100.0, repeat_h=1.0)
CONTEXTS = {"v1": Context((ContextPart("lesson", text="a"),))}


def seen(
    name: str,
    at: float,
    *,
    task: str = "",
    session: str = "",
    group: str = "",
    library: str = "empty",
    upstream: str = "a",
    prompt: Any = "q",
    reward: float | None = None,
    texts: tuple[str, ...] = ("reply",),
    session_rating: Rating | None = None,
    ratings: Mapping[int, Rating] | None = None,
) -> CapturedRequest:
    turns = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return CapturedRequest(
        name, at, task, session, group, str(turns[0]), library, library, upstream, turns,
        {i: ("stop", {"role": "assistant", "content": t}) for i, t in enumerate(texts)},
        ratings or {0: Rating(reward)}, session_rating,
    )  # fmt: skip


def made(
    *rows: CapturedRequest, now: float = 50.0, settings: GroupSettings = SETTINGS
) -> list[Any]:
    return make_groups(rows, settings, "r", CONTEXTS, now=now)


def test_repeats_of_a_task_are_one_group_and_equal_texts_are_not() -> None:
    rows = [seen("1", 1, task="t", reward=1.0), seen("2", 2, task="t", reward=0.0),
            seen("3", 3), seen("4", 4)]  # fmt: skip
    (group,) = made(*rows)
    assert group.rewards_G == (1.0, 0.0) and group.task.task_id == "t"
    by_text = made(*rows, settings=SETTINGS.model_copy(update={"task_identity": "messages"}))
    assert [len(g.rollouts) for g in by_text] == [2, 2]


def test_a_promotion_another_model_or_another_question_splits_a_group() -> None:
    rows = [
        seen("1", 1, task="t"),
        seen("2", 2, task="t", library="v1"),
        seen("3", 3, task="t", upstream="b"),
        seen("4", 4, task="t", prompt="other"),
    ]
    groups = made(*rows, now=1e6)
    assert [len(g.rollouts) for g in groups] == [1, 1, 1, 1]
    assert groups[1].context == CONTEXTS["v1"]


def test_a_group_closes_when_it_is_full_idle_or_closed_by_its_client() -> None:
    one = seen("1", 1, group="g")
    assert made(one) == []
    assert len(made(one, now=102.0)) == 1
    closed = make_groups([one], SETTINGS, "r", {}, now=2.0, closed=frozenset({"g"}))
    assert len(closed) == 1


def test_all_choices_of_one_request_are_a_group_of_their_own() -> None:
    ratings = {0: Rating(1.0), 1: Rating(0.0), 2: Rating()}
    (group,) = made(seen("1", 1, texts=("a", "b", "c"), ratings=ratings))
    assert [r.answer for r in group.rollouts] == ["a", "b", "c"]
    assert group.rewards_G == (1.0, 0.0) and group.is_informative()


def test_a_session_is_one_rollout_with_what_came_back_between_its_turns() -> None:
    first = [{"role": "user", "content": "q"}]
    second = [
        *first,
        {"role": "assistant", "content": "call"},
        {"role": "tool", "tool_call_id": "1", "content": "result"},
    ]
    rows = []
    for name in ("x", "y"):
        rows += [
            seen(f"{name}1", 1, session=name, group="g", prompt=first, texts=("call",)),
            seen(f"{name}2", 2, session=name, group="g", prompt=second, texts=("done",),
                 session_rating=Rating(1.0 if name == "x" else 0.0)),
        ]  # fmt: skip
    (group,) = made(*rows)
    assert group.rewards_G == (1.0, 0.0)
    steps = group.rollouts[0].steps
    assert [s.action.content for s in steps] == ["call", "done"]
    assert [m.content for m in steps[0].observations] == ["result"]


def test_a_conflict_teaches_nothing_until_it_is_settled() -> None:
    rows = [
        seen("1", 1, task="t", ratings={0: Rating(1.0, is_conflict=True)}),
        seen("2", 2, task="t", reward=0.0),
    ]
    (group,) = made(*rows)
    assert group.rewards_G == (0.0,)


def test_a_later_window_is_another_group() -> None:
    rows = [seen("1", 1, task="t"), seen("2", 3 * 3600.0, task="t")]
    assert len(made(*rows, now=1e6)) == 2


def test_parts_that_are_no_text_are_named_and_not_kept() -> None:
    (turn,) = read_turns(
        [{"role": "user", "content": [{"type": "text", "text": "see "}, {"type": "image_url"}]}]
    )
    assert turn.content == "see [image_url]"
