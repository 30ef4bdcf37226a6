import pytest

from tfgrpo.lm.usage import normalise_usage, share_usage
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
