"""The pool of versions: shares by task, parents, pairs, unions."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.experience import Library
from tfgrpo.experience.edits import Edit
from tfgrpo.learning.pool import Pool, best_shares, united
from tfgrpo.learning.version import Version
from tfgrpo.statistics import Scores


def version(text: str) -> Version:
    return Version(Library().apply([Edit("add", text)]).library)


A, B, C = (version(f"Lesson that says {word} and nothing else.") for word in ("one", "two", "six"))
SCORES: dict[str, Scores] = {
    A.version_id: {"t1": [1.0], "t2": [0.0]},
    B.version_id: {"t1": [0.0], "t2": [1.0]},
    C.version_id: {"t1": [0.0], "t2": [0.5]},
}


def pool(size: int = 4) -> Pool:
    return Pool(size, lambda key: SCORES[key])


@given(
    st.dictionaries(
        st.sampled_from("abcd"),
        st.fixed_dictionaries({t: st.lists(st.integers(0, 2), min_size=1) for t in ("x", "y")}),
        min_size=1,
    )
)
def test_shares_add_up_to_one_and_a_version_best_nowhere_has_none(
    scores: dict[str, Scores],
) -> None:
    shares = best_shares(scores)
    assert sum(shares.values()) == pytest.approx(1.0)
    for name, share in shares.items():
        best_somewhere = any(
            sum(scores[name][t]) / len(scores[name][t])
            >= max(sum(s[t]) / len(s[t]) for s in scores.values()) - 1e-9
            for t in ("x", "y")
        )
        assert (share > 0) == best_somewhere


def test_one_line_of_descent_starts_from_its_newest_version() -> None:
    made = pool()
    made.add(A, ["empty"])
    made.add(B, [A.version_id])
    assert made.parent(1, 0) == B and made.pair() is None


def test_of_several_tips_each_is_drawn_for_what_it_is_best_at_and_never_a_dominated_one() -> None:
    made = pool()
    for one in (A, B, C):
        made.add(one, ["empty"])
    drawn = [made.parent(step, 0) for step in range(60)]
    assert {v.version_id for v in drawn if v} == {A.version_id, B.version_id}
    assert drawn == [made.parent(step, 0) for step in range(60)], "seeded"


def test_two_tips_that_are_each_best_somewhere_are_united_once() -> None:
    made = pool()
    for one in (A, B, C):
        made.add(one, ["empty"])
    first, second = made.pair() or (None, None)
    assert {first, second} == {A, B}
    again = made.pair()
    assert again is None or set(again) != {A, B}


def test_too_many_tips_lose_the_one_that_is_best_least() -> None:
    made = pool(size=2)
    for one in (A, B, C):
        made.add(one, ["empty"])
    assert made.tips == [A, B]


def test_a_union_holds_both_libraries_and_gives_new_ids() -> None:
    both = united(A.library, B.library)
    assert [e.text for e in both.entries] == [A.library.entries[0].text, B.library.entries[0].text]
    assert [e.experience_id for e in both.entries] == ["E1", "E2"] and both.next_number == 3
    assert united(both, A.library).version_id == both.version_id, "nothing is taken twice"
