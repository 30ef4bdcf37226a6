"""Marks of thinking: every reader sees the answer, whatever marks and order a model uses."""

from __future__ import annotations

import asyncio

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.context import EMPTY_CONTEXT
from tfgrpo.lm.wire import ChoiceParts
from tfgrpo.policies.chat import FunctionPolicy
from tfgrpo.rollout import Usage
from tfgrpo.runtime.thinking import has_open_thinking, split_thinking
from tfgrpo.verifiers import Exact

PAIRS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("<THINK>", "</THINK>"),
    ('<think time="3">', "</think>"),
    ("<thought>", "</thought>"),
    ("<reasoning>", "</reasoning>"),
    ("<seed:think>", "</seed:think>"),
    ("<ant_thinking>", "</ant_thinking>"),
    ("[THINK]", "[/THINK]"),
    ("[thinking]", "[/thinking]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<|think|>", "<|/think|>"),
    ("◁think▷", "◁/think▷"),
    ("<unused94>thought\n", "<unused95>"),
    ("<|channel|>analysis<|message|>", "<|end|>"),
]
pairs = st.sampled_from(PAIRS)
words = st.text("abc 12.\n", min_size=1, max_size=20).filter(str.strip)


def completed(text):
    parts = ChoiceParts()
    parts.add({"finish_reason": "stop"}, {"content": text})
    return parts.completion(usage=Usage(), model="m")


@pytest.mark.parametrize(
    ("text", "answer", "thought"),
    [
        ("[THINK]maybe 5[/THINK]4", "4", "maybe 5"),
        ("<think>a</think><think>b</think>4", "4", "a\nb"),
        ("<|begin_of_thought|>5?<|end_of_thought|>\n\n4", "4", "5?"),
        (
            "<|begin_of_thought|>5<|end_of_thought|><|begin_of_solution|>4<|end_of_solution|>",
            "4",
            "5",
        ),
        ("5?[/THINK]4", "4", "5?"),
        ("a</think>b</think>4", "4", "a\nb"),
        ("<think>a</thinking>4", "4", "a"),
        ("Sure.\n<think>5</think>\n4", "Sure.\n4", "5"),
        ("<think>```py\nx\n</think>\n```py\ny\n```", "```py\ny\n```", "```py\nx"),
        (
            "<|channel|>analysis<|message|>5<|end|><|start|>assistant<|channel|>final<|message|>4",
            "4",
            "5",
        ),
        ("analysisSo 5?assistantfinal4", "4", "So 5?"),
        ("5?<|end|><|start|>assistant<|channel|>final<|message|>4", "4", "5?"),
        ("[THINK]cut", "", "cut"),
    ],
)  # fmt: skip
def test_marks_of_published_models_are_read(text, answer, thought):
    assert split_thinking(text) == (answer, thought)
    reply = completed(text)
    assert (reply.text, reply.reasoning) == (answer, thought)


@pytest.mark.parametrize(
    "text",
    [
        "Close it with `</think>` and go on.",
        'Write "</think>" at the end.',
        "```python\nre.sub('<think>.*?</think>', '', text)\n```",
        "See [1] and [think tank](http://x).",
        "I think that is 4.<|end|>",
        "a < think > b? No: a<b.",
    ],
)
def test_talk_about_marks_stays_text(text):
    assert split_thinking(text) == (text, "")


@given(
    st.lists(st.tuples(pairs, words), min_size=1, max_size=4),
    words,
    st.sampled_from(["", " ", "\n\n"]),
)
def test_blocks_of_any_marks_in_any_order_leave_the_answer(blocks, answer, gap):
    text = gap.join(f"{o}{thought}{c}" for (o, c), thought in blocks) + gap + answer
    assert split_thinking(text)[0] == answer.lstrip()
    assert not has_open_thinking(text)


@given(st.lists(st.tuples(pairs, words), max_size=3), words, st.sampled_from(PAIRS[:-1]), words)
def test_a_closing_mark_alone_ends_the_thinking_before_it(blocks, thought, pair, answer):
    text = "".join(f"{o}{t}{c}" for (o, c), t in blocks) + thought + pair[1] + answer
    assert split_thinking(text)[0] == answer.lstrip()


@given(st.lists(st.tuples(pairs, words), max_size=3), pairs, words)
def test_an_opening_mark_alone_leaves_no_answer(blocks, pair, thought):
    text = "".join(f"{o}{t}{c}" for (o, c), t in blocks) + pair[0] + thought
    assert split_thinking(text)[0] == ""
    assert has_open_thinking(text)


@given(st.lists(st.sampled_from([*(m for p in PAIRS for m in p), "4", "\n", "`", "```\n", " "])))
def test_no_order_of_marks_raises_or_loses_to_a_second_reading(pieces):
    answer, _ = split_thinking("".join(pieces))
    assert answer in "".join(pieces) or answer.strip() != ""


@pytest.mark.parametrize(
    "unit", ["<think>", "</think>", "<think>a</think>", "[THINK]", "`<think>", "<think "]
)
def test_reading_marks_takes_steps_in_proportion_to_the_text(unit, steps_of):
    few, many = (steps_of(split_thinking, unit * n + "4") for n in (500, 1000))
    assert many <= 2.5 * few


@pytest.mark.parametrize("pair", PAIRS)
def test_a_verifier_and_a_function_policy_read_the_same_marks(pair):
    text = f"{pair[0]}maybe 5{pair[1]}4"
    verifier = Exact()
    assert asyncio.run(verifier.score(said(text), task("4"))).reward == 1.0
    policy = FunctionPolicy(lambda prompt, context: text, policy_id="p")
    made = asyncio.run(policy.attempt(task("4"), EMPTY_CONTEXT, 0))
    assert (made.answer, made.steps[0].action.reasoning) == ("4", "maybe 5")


@pytest.mark.parametrize(
    "text",
    [
        "<|channel>thought\na<channel|>4",
        "<reason>a</reason>4",
        "<antThinking>a</antThinking>4",
        "<thinking_process>a</thinking_process>4",
        "<think>a<\\/think>4",
        "\ufeff<think>a</think>4",
        " \u200b<think>a</think>4",
    ],
)
def test_more_spellings_of_the_marks_leave_the_answer(text):
    answer, thought = split_thinking(text)
    assert (answer, thought.strip()) == ("4", "a")


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<analysis>5?</analysis>4", "4"),
        ("<think/>4", "4"),
        ("<think />\n4", "4"),
        ("<reasoning-content>5</reasoning-content>4", "4"),
        ("<rationale>5</rationale>\n\n4", "4"),
        ("```thinking\n5\n```\n4", "4"),
        ('<details type="reasoning" done="true">\n<summary>T</summary>\n5\n</details>\n4', "4"),
        ("<|im_start|>think\n5\n<|im_start|>answer\n4", "4"),
        ("<|inner_prefix|>5<|inner_suffix|>4", "4"),
        ("&lt;think&gt;5&lt;/think&gt;4", "4"),
        ("<think>5</think>4</think>", "4"),
    ],
)
def test_further_marks_of_thinking_leave_the_answer(text, answer):
    assert split_thinking(text)[0] == answer
    assert not has_open_thinking(text)


@pytest.mark.parametrize(
    "text",
    [
        "<analysis>The whole answer.</analysis>",
        "I add an <analysis>part</analysis> to it.",
        "Answer: 4\n<rationale>since 2+2</rationale>",
        "<details><summary>Steps</summary>5</details>4",
        "[analysis] of 4",
        "<analysis>open",
        "```python\nthinking = 4\n```",
    ],
)
def test_words_that_may_name_a_part_of_the_answer_stay_text(text):
    assert split_thinking(text) == (text, "")


SOFT = ["analysis", "rationale", "planning", "deliberation", "introspection", "reflect"]


@given(st.sampled_from(SOFT), words, words, st.booleans())
def test_a_soft_mark_is_thinking_exactly_where_an_answer_follows(word, thought, answer, square):
    left, right = "[]" if square else "<>"
    block = f"{left}{word}{right}{thought}{left}/{word}{right}"
    assert split_thinking(block + answer) == (answer.lstrip(), thought.strip())
    assert split_thinking(block) == (block, "")
    assert split_thinking(f"First: {block}{answer}") == (f"First: {block}{answer}", "")
