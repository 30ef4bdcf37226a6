"""The states of learning: no path to live prompts without a person's word."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.serve.learning.states import EVENTS, LearningState, Transition, apply, fold
from tfgrpo.serve.wire.errors import ApiError


def happen(state: LearningState, *events: str, **body: object) -> LearningState:
    for event in events:
        state = apply(state, Transition(1.0, state.version + 1, event, "x", "", body))
    return state


WAITING = happen(happen(LearningState(), "propose"), "proposed", candidate="v1")
WAITING = happen(WAITING, "gated")


def test_the_way_of_a_candidate() -> None:
    live = happen(WAITING, "approve")
    assert (live.name, live.experiment, live.number, live.share_index) == ("canary", "x1", 1, 0)
    live = happen(live, "grow", "grow")
    assert live.share_index == 2
    done = happen(live, "promote")
    assert (done.name, done.current, done.candidate, done.previous) == ("watched", "v1", "", ("",))
    back = happen(done, "roll_back")
    assert (back.name, back.current, back.previous) == ("collecting", "", ())


def test_a_roll_back_during_the_test_keeps_the_library_in_force() -> None:
    live = happen(WAITING, "approve")
    back = happen(live, "roll_back")
    assert (back.name, back.current, back.candidate) == ("collecting", "", "")
    assert happen(happen(back, "propose"), "proposed", candidate="v2").number == 1


def test_a_command_for_another_version_is_refused() -> None:
    with pytest.raises(ApiError) as caught:
        apply(WAITING, Transition(1.0, WAITING.version, "approve", "person", ""))
    assert caught.value.status == 409


def test_there_is_nothing_to_go_back_to_at_the_start() -> None:
    with pytest.raises(ApiError, match="no earlier library"):
        happen(LearningState(), "roll_back")


@given(st.lists(st.sampled_from(sorted(EVENTS)), max_size=40))
def test_nothing_is_ever_live_that_was_not_approved(events: list[str]) -> None:
    state = LearningState()
    approved: set[str] = set()
    made: list[Transition] = []
    for number, event in enumerate(events):
        given = Transition(float(number), state.version + 1, event, "x", "",
                           {"candidate": f"v{number}"})  # fmt: skip
        try:
            after = apply(state, given)
        except ApiError:
            continue
        if event == "approve":
            approved.add(state.candidate)
        state = after
        made.append(given)
        live = {state.current} | ({state.candidate} if state.name == "canary" else set())
        assert live - {""} <= approved
        assert set(state.previous) - {""} <= approved
        assert len(state.previous) <= 20
    assert fold(made) == state
