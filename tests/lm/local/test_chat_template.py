"""Turns through templates that refuse some of them; texts that no tokenizer can carry."""

from __future__ import annotations

import logging

import jinja2
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import ProviderError
from tfgrpo.lm.local.chat_template import ChatFormat
from tfgrpo.messages import Message
from tfgrpo.protocols import Request, Sampling, ToolSpec
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.turn_tools import TurnText
from tfgrpo.rollout import Task
from tfgrpo.runtime.texts.surrogates import without_surrogates

PLAIN = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
GEMMA = (
    "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}"
    "{% endif %}{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
    "{{ raise_exception('Conversation roles must alternate user/assistant/user/assistant/...') }}"
    "{% endif %}<{{ m.role }}>{{ m.content }}{% endfor %}"
)
DROPS = "{% for m in messages if m.role != 'system' %}<{{ m.role }}>{{ m.content }}{% endfor %}"


class Tokenizer:
    """Renders a template as transformers does; ids are code points."""

    all_special_ids = ()

    def __init__(self, template):
        self.chat_template = template

    def apply_chat_template(self, rows, *, tools, tokenize, **options):
        def raise_exception(message):
            raise jinja2.TemplateError(message)

        made = jinja2.Template(self.chat_template).render(
            messages=rows, raise_exception=raise_exception, **options
        )
        return made

    def encode(self, text, add_special_tokens=True):
        text.encode("utf-8")  # as a real tokenizer, it takes no lone surrogate
        return [ord(c) for c in text]


def rendered(template, *messages, **fields):
    request = Request(tuple(messages), **fields)
    return "".join(map(chr, ChatFormat(Tokenizer(template), ()).prompt_ids(request)))


SYSTEM, USER = Message("system", "be brief"), Message("user", "hi")


@pytest.mark.parametrize(
    ("template", "messages", "text"),
    [
        (PLAIN, (SYSTEM, USER), "<system>be brief<user>hi"),
        (GEMMA, (SYSTEM, USER), "<user>be brief\n\nhi"),
        (DROPS, (SYSTEM, USER), "<user>be brief\n\nhi"),
        (DROPS, (Message("system", "hi"), USER), "<user>hi\n\nhi"),
        (DROPS, (Message("system", "user"), USER), "<user>user\n\nhi"),
        (GEMMA, (SYSTEM,), "<user>be brief"),
        (GEMMA, (USER, USER), "<user>hi\n\nhi"),
        (GEMMA, (SYSTEM, USER, Message("assistant", "a"), SYSTEM, USER),
         "<user>be brief\n\nhi<assistant>a<user>be brief\n\nhi"),
        (GEMMA, (USER, Message("assistant", "a"), Message("tool", "r"), USER),
         "<user>hi<assistant>a<user><tool_response>r</tool_response>\n\nhi"),
        (GEMMA, (Message("assistant", "a"), USER), "<user>…<assistant>a<user>hi"),
    ],
)  # fmt: skip
def test_turns_that_a_template_refuses_or_drops_are_folded(template, messages, text):
    assert rendered(template, *messages) == text


PARTS = (
    "{% for m in messages %}<{{ m.role }}>"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
)


def test_a_template_that_takes_lists_of_parts_alone_gets_them():
    assert rendered(PARTS, SYSTEM, USER) == "<system>be brief<user>hi"
    folding = "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + PARTS
    assert rendered(folding, SYSTEM, USER) == "<user>be brief\n\nhi"


def test_a_template_that_changes_texts_keeps_them_texts():
    upper = "{% for m in messages %}<{{ m.role }}>{{ m.content.upper() }}{% endfor %}"
    assert rendered(upper, USER) == "<user>HI"


def test_the_folding_is_told_once(caplog):
    chat = ChatFormat(Tokenizer(GEMMA), ())
    with caplog.at_level(logging.WARNING):
        for _ in range(3):
            chat.prompt_ids(Request((SYSTEM, USER)))
    assert [r.getMessage() for r in caplog.records] == [
        "the model's chat template refuses turns as they are (System role not supported); such "
        "turns are folded into user turns"
    ]


def test_a_template_that_refuses_everything_says_why():
    refuses = "{{ raise_exception('no turns at all') }}"
    with pytest.raises(ProviderError, match="no turns at all"):
        rendered(refuses, USER)


turns = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    st.text("ab\ud83d é", max_size=5),
)


@given(st.lists(turns, min_size=1, max_size=6), st.sampled_from([PLAIN, GEMMA, DROPS, ""]))
def test_every_text_of_every_order_of_turns_reaches_the_model(messages, template):
    text = rendered(template, *messages)
    at = 0
    for message in messages:
        wanted = without_surrogates(message.content)
        if message.role == "system":
            assert not wanted.strip() or wanted in text  # blanks alone tell a model nothing
        else:
            at = text.index(wanted, at)


@given(st.text(st.characters(codec=None), max_size=20) | st.text("\ud800\udc00a", max_size=9))
def test_a_text_without_lone_surrogates_can_be_encoded_and_whole_characters_stay(text):
    made = without_surrogates(text)
    made.encode("utf-8")
    if not any(0xD800 <= ord(c) <= 0xDFFF for c in text):
        assert made == text


TOOLS = (ToolSpec("f", "", {"type": "object"}),)


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"response_format": {"type": "json_object"}}, "response_format"),
        ({"response_format": {"type": "json_schema", "json_schema": {}}}, "response_format"),
        ({"tools": TOOLS, "tool_choice": "required"}, "tool_choice"),
        ({"tools": TOOLS, "tool_choice": "f"}, "tool_choice"),
        ({"sampling": Sampling(extra={"top_k": 5})}, "top_k"),
        ({"sampling": Sampling(extra={"guided_json": {}})}, "guided_json"),
    ],
)
def test_what_a_local_model_cannot_do_is_refused_by_name(fields, named):
    with pytest.raises(ProviderError, match=named) as caught:
        rendered(PLAIN, USER, **fields)
    assert caught.value.kind == "bad_request"


def test_what_a_local_model_can_do_is_done():
    shows = PLAIN + "{{ add_generation_prompt }}{{ continue_final_message }}{{ enable_thinking }}"
    extra = {"continue_final_message": True, "chat_template_kwargs": {"enable_thinking": False}}
    text = rendered(shows, USER, sampling=Sampling(extra=extra))
    assert text == "<user>hiFalseTrueFalse"
    assert rendered(PLAIN, USER, response_format={"type": "text"}) == "<user>hi"


TRIMS = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}{% endfor %}"


def test_a_template_that_trims_a_system_turn_has_not_dropped_it():
    text = rendered(TRIMS, Message("system", " be brief \n"), USER)
    assert text == "<system>be brief<user>hi"


class TrainingTokenizer(Tokenizer):
    """As the trainer calls one."""

    def apply_chat_template(self, rows, *, tokenize, **options):
        return super().apply_chat_template(rows, tools=None, tokenize=tokenize, **options)

    def __call__(self, text, add_special_tokens):
        return {"input_ids": self.encode(text)}

    def decode(self, ids, **options):
        return "".join(map(chr, ids))


@pytest.mark.parametrize(
    ("template", "text"),
    [(GEMMA, "<user>be brief\n\nhi \ufffd"), (DROPS, "<user>be brief\n\nhi \ufffd"),
     (PLAIN, "<system>be brief<user>hi \ufffd")],
)  # fmt: skip
def test_the_trainers_prompts_fold_turns_and_carry_any_text(template, text):
    prompter = Prompter(TrainingTokenizer(template), system="be brief", context_tokens=999)
    assert "".join(map(chr, prompter.ids(Task("t", "hi \ud83d")))) == text


def test_observations_of_a_tool_are_folded_and_carry_any_text():
    turns = TurnText(TrainingTokenizer(GEMMA), template="chat", eos_ids=())
    tail = "".join(map(chr, turns([Message("tool", "7 \ud83d"), Message("user", "so?")], ())))
    assert tail == "<user><tool_response>7 \ufffd</tool_response>\n\nso?"


def test_calls_are_found_between_text_and_unfinished_ones():
    text = 'a<tool_call>{"name": "f"}</tool_call>b<tool_call>no</tool_call><tool_call>{"name": "g"}'
    rest, calls = ChatFormat.tool_calls(text)
    assert rest == "ab<tool_call>no</tool_call>" and [c.name for c in calls] == ["f", "g"]
    deep = '<tool_call>{"name": "f", "arguments": ' + "[" * 100_000 + "}</tool_call>"
    assert ChatFormat.tool_calls(deep) == (deep, ())
