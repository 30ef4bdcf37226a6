import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.lm.usage import normalise_usage, share_usage, unseen_in
from tfgrpo.rollout import Usage

PRICES = {"uncached": 3.0, "write": 3.75, "read": 0.30, "out": 15.0}


def money(u: Usage) -> float:
    return (
        u.uncached_tokens * PRICES["uncached"]
        + u.cache_write_tokens * PRICES["write"]
        + u.cache_read_tokens * PRICES["read"]
        + u.completion_tokens * PRICES["out"]
    ) / 1e6


def test_beside_style_is_not_billed_twice():
    usage = normalise_usage(
        {
            "input_tokens": 3,
            "cache_creation_input_tokens": 12304,
            "cache_read_input_tokens": 0,
            "output_tokens": 550,
        }
    )
    assert usage.prompt_tokens == 12307
    assert money(usage) == pytest.approx(0.054399, abs=1e-9)


def test_the_same_usage_in_both_styles_is_the_same_money():
    beside = normalise_usage(
        {
            "input_tokens": 40,
            "cache_creation_input_tokens": 300,
            "cache_read_input_tokens": 1000,
            "output_tokens": 7,
        }
    )
    inside = normalise_usage(
        {
            "prompt_tokens": 1340,
            "prompt_tokens_details": {"cached_tokens": 1000, "cache_write_tokens": 300},
            "completion_tokens": 7,
            "total_tokens": 1347,
        }
    )
    assert money(beside) == money(inside)
    assert not beside.is_estimated and not inside.is_estimated


def test_cached_tokens_inside_the_prompt_count_are_disjoint():
    usage = normalise_usage(
        {
            "prompt_tokens": 262960,
            "prompt_tokens_details": {"cached_tokens": 257955},
            "completion_tokens": 1744,
        }
    )
    cost = (usage.uncached_tokens * 1.25 + usage.cache_read_tokens * 0.625) / 1e6
    assert usage.prompt_tokens == 262960
    # 5,005 new and 257,955 cached tokens plus 1,744 out at 10 per million
    assert cost + usage.completion_tokens * 10 / 1e6 == pytest.approx(0.184918, abs=1e-6)


@pytest.mark.parametrize(
    "report",
    [
        None,
        {},
        {"prompt_tokens": None, "completion_tokens": None},
        {"prompt_tokens": 0, "completion_tokens": 0},
        {"prompt_tokens": -5, "completion_tokens": 3},
        {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": 99},
        {"prompt_tokens": 10, "completion_tokens": 3, "total_tokens": "13"},
        {"prompt_tokens": 5, "completion_tokens": 1,
         "prompt_tokens_details": {"cached_tokens": 50}},
        {"prompt_tokens": 5, "completion_tokens": 1,
         "completion_tokens_details": {"reasoning_tokens": 9}},
        {"prompt_tokens": float("nan"), "completion_tokens": True},
        "12 tokens",
    ],
)  # fmt: skip
def test_bad_usage_is_estimated_flagged_and_never_nothing(report):
    usage = normalise_usage(report, prompt_chars=40, reply_chars=8)
    assert usage.is_estimated
    assert usage.prompt_tokens >= 5 and usage.completion_tokens >= 1
    assert usage.cost_usd is None


def test_reasoning_is_a_class_of_its_own():
    usage = normalise_usage(
        {
            "prompt_tokens": 5,
            "completion_tokens": 30,
            "completion_tokens_details": {"reasoning_tokens": 20},
            "total_tokens": 35,
        }
    )
    assert (usage.text_tokens, usage.reasoning_tokens) == (10, 20)
    assert not usage.is_estimated


@pytest.mark.parametrize("weights", [[1], [0, 0, 0], [5, 1, 1], [3, 0, 9, 2]])
def test_shares_sum_to_the_call(weights):
    whole = Usage(7, 3, 2, 11, 5, 1, None, True)
    total = Usage()
    for share in share_usage(whole, weights):
        total = total + share
    assert total == whole


SHORT = {"prompt_chars": 40, "reply_chars": 8, "unseen": unseen_in(64)}


@pytest.mark.parametrize(
    "report",
    [
        {"prompt_tokens": 10_000_000, "completion_tokens": 2, "total_tokens": 10_000_002},
        {"prompt_tokens": 10, "completion_tokens": 10_000_000, "total_tokens": 10_000_010},
        {"input_tokens": 3, "cache_read_input_tokens": 9_000_000, "output_tokens": 2},
        {"prompt_tokens": 10, "completion_tokens": 2,
         "completion_tokens_details": {"reasoning_tokens": 5_000_000}},
        {"prompt_tokens": 300_000, "completion_tokens": 2},
    ],
)  # fmt: skip
def test_more_tokens_than_a_short_call_can_have_are_not_believed(report):
    usage = normalise_usage(report, **SHORT)
    assert usage.is_estimated
    assert usage.prompt_tokens <= 10 and usage.completion_tokens <= 2


@pytest.mark.parametrize(
    "report",
    [
        {"prompt_tokens": 30_000, "completion_tokens": 2, "total_tokens": 30_002},  # instructions
        {"prompt_tokens": 10, "completion_tokens": 60_000, "total_tokens": 60_010,
         "completion_tokens_details": {"reasoning_tokens": 59_990}},
    ],
)  # fmt: skip
def test_what_servers_add_to_a_short_call_is_believed(report):
    usage = normalise_usage(report, **SHORT)
    assert not usage.is_estimated and usage.total_tokens == report["total_tokens"]


counts = st.none() | st.integers(-5, 10**8) | st.floats(allow_nan=True)
names = st.sampled_from(
    ["prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cached_tokens",
     "cache_read_input_tokens", "cache_creation_input_tokens", "total_tokens", "reasoning_tokens"]
)  # fmt: skip
details = st.sampled_from(["prompt_tokens_details", "completion_tokens_details"])


@given(
    st.dictionaries(names, counts),
    st.dictionaries(details, st.dictionaries(names, counts)),
    st.integers(0, 10**6),
)
def test_no_report_counts_more_than_the_call_can_have_used(row, inner, size):
    usage = normalise_usage({**row, **inner}, prompt_chars=size, reply_chars=size,
                            unseen=unseen_in(100))  # fmt: skip
    most_prompt, most_reply = size + 262_144, size + 131_472
    assert max(usage.uncached_tokens, usage.cache_read_tokens) <= most_prompt
    assert max(usage.text_tokens, usage.reasoning_tokens) <= most_reply
