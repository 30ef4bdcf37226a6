"""Errors that stand beside choices that look whole, in whichever field a server says them."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.lm.test_faults_streams import WHOLE, chunk, complete
from tfgrpo.errors import ProviderError
from tfgrpo.lm.error_fields import error_in_answer, said_in
from tfgrpo.serve.endpoints.dialects import CHAT
from tfgrpo.serve.wire.events import ChatEvents
from tfgrpo.testing import events, raw

FAILED = [
    ({"status": "error", "message": "the model is overloaded"}, "overloaded"),
    ({"success": False, "msg": "invalid api key"}, "auth"),
    ({"code": 500, "msg": "busy"}, "overloaded"),
    ({"base_resp": {"status_code": 1002, "status_msg": "rate limit"}}, "rate_limit"),
    ({"error_code": 336003, "error_msg": "no such thing"}, "bad_reply"),
    ({"code": "InvalidParameter", "message": "quota exceeded, check billing"}, "quota"),
    ({"fault": {"faultstring": "Too many requests"}}, "rate_limit"),
    ({"ok": False}, "bad_reply"),
    ({"statusCode": 429, "message": "x"}, "rate_limit"),
]
FINE = [
    {"code": 0, "message": "ok"},
    {"code": 200, "success": True, "msg": "ok"},
    {"code": 20000, "message": "Ok"},
    {"code": "SUCCESS"},
    {"status": "completed", "error": None},
    {"status": 200, "errors": []},
    {"error": {"code": 0, "message": ""}},
    {"error": "none"},
    {"base_resp": {"status_code": 0, "status_msg": "success"}},
    {"message": "Please cite us.", "detail": "v2"},
]


@pytest.mark.parametrize(("fields", "kind"), FAILED)
def test_an_error_beside_whole_choices_is_an_error(fields: dict[str, Any], kind: str) -> None:
    body = {"choices": WHOLE, **fields}
    with pytest.raises(ProviderError) as caught:
        complete(raw(json.dumps(body).encode()), stream=False)
    assert caught.value.kind == kind
    with pytest.raises(ProviderError) as caught:
        complete(events([chunk({"content": "4"}, "stop", **fields)]))
    assert caught.value.kind == kind
    with pytest.raises(ProviderError) as caught:  # the gateway reads the same fields
        CHAT.read(json.dumps(body).encode(), "id", 10, "here")
    assert caught.value.kind == kind
    with pytest.raises(ProviderError):
        row = {"choices": [{"index": 0, "delta": {"content": "4"}}], **fields}
        ChatEvents("id", wants_usage=False, where="here").feed(
            b"data: " + json.dumps(row).encode() + b"\n\n"
        )


@pytest.mark.parametrize("fields", FINE)
def test_a_field_that_says_that_all_is_well_is_no_error(fields: dict[str, Any]) -> None:
    assert error_in_answer({"choices": WHOLE, **fields}) is None
    (reply,) = complete(raw(json.dumps({"choices": WHOLE, **fields}).encode()), stream=False)
    assert reply.text == "4"


@pytest.mark.parametrize(
    ("body", "kind"),
    [
        ({"detail": "Too many requests"}, "rate_limit"),
        ({"choices": None, "error_msg": "the engine is overloaded"}, "overloaded"),
        ({"choices": []}, "bad_reply"),
    ],
)
def test_an_answer_without_choices_is_known_by_what_it_says(body: Any, kind: str) -> None:
    with pytest.raises(ProviderError) as caught:
        complete(raw(json.dumps(body).encode()), stream=False)
    assert caught.value.kind == kind


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(
        st.sampled_from(["error", "errors", "code", "status", "message", "choices", "detail", "x"]),
        inner, max_size=4),
    max_leaves=12,
)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["error", "code", "status", "base_resp", "ok"]), JSON))
def test_any_fields_are_read_without_an_exception(fields: dict[str, Any]) -> None:
    error_in_answer({"choices": [fields, {"message": fields}], **fields})
    said = said_in(fields)
    assert said is None or said.strip()


WORDS = st.sampled_from([None, "", "ok", "error", "failed", 0, 500, False, True, "busy"])
BODY = st.dictionaries(st.sampled_from(["content", "role", "error", "status"]), WORDS, max_size=3)
CHOICE = st.one_of(
    WORDS,
    st.dictionaries(
        st.sampled_from(["index", "message", "delta", "finish_reason", "error", "status", "type"]),
        st.one_of(WORDS, BODY), max_size=4,
    ),
)  # fmt: skip
ANSWER = st.dictionaries(
    st.sampled_from(["id", "object", "created", "model", "choices", "usage", "error", "code",
                     "status", "success", "base_resp", "type", "service_tier"]),
    st.one_of(WORDS, BODY, st.lists(CHOICE, max_size=3)), max_size=6,
)  # fmt: skip


@given(ANSWER)
def test_the_short_way_for_plain_answers_never_hides_an_error(answer: dict[str, Any]) -> None:
    from unittest import mock

    from tfgrpo.lm import error_fields

    with mock.patch.object(error_fields, "_is_plain", return_value=False):
        slowly = error_in_answer(answer)
    assert error_in_answer(answer) == slowly
