"""What crosses between run and worker comes back as it was: requests by key, errors by class."""

from __future__ import annotations

import json

import hypothesis
import pytest
from hypothesis import strategies as st

from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    ExecutorError,
    ProviderError,
    StoreError,
    TfgrpoError,
    UnitLost,
)
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Limits, Request, Sampling, ToolSpec
from tfgrpo.rollout import Usage
from tfgrpo.runtime.redaction import forget_secrets, register
from tfgrpo.store.keys import RequestKey
from tfgrpo.workers.codec import (
    error_from_dict,
    error_to_dict,
    request_from_dict,
    request_to_dict,
)
from tfgrpo.workers.processes import child_environment

TEXT = st.text(st.characters(codec=None), max_size=20)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | TEXT,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=6,
)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "user", "assistant", "tool"]),
    TEXT,
    st.lists(st.builds(ToolCall, TEXT, TEXT, TEXT), max_size=2).map(tuple),
    TEXT,
    TEXT,
)
SAMPLING = st.builds(
    Sampling,
    temperature=st.none() | st.sampled_from([0, 1, 0.7]),
    top_p=st.none() | st.just(0.9),
    max_tokens=st.none() | st.integers(1, 100),
    stop=st.lists(TEXT, max_size=2).map(tuple),
    logprobs=st.booleans(),
    top_logprobs=st.integers(0, 20),
    reasoning_effort=st.none() | TEXT,
    extra=st.dictionaries(TEXT, JSON, max_size=2),
)
REQUESTS = st.builds(
    Request,
    st.lists(MESSAGES, max_size=3).map(tuple),
    tools=st.lists(
        st.builds(ToolSpec, TEXT, TEXT, st.dictionaries(TEXT, JSON, max_size=2)), max_size=2
    ).map(tuple),
    tool_choice=st.none() | TEXT,
    response_format=st.none() | st.dictionaries(TEXT, JSON, max_size=2),
    sampling=SAMPLING,
    limits=st.builds(Limits, timeout_s=st.sampled_from([1.0, 120.0])),
)


@hypothesis.given(REQUESTS)
def test_a_request_keeps_its_key_and_limits(request: Request) -> None:
    back = request_from_dict(json.loads(json.dumps(request_to_dict(request))))
    identity = {"model": "m"}
    assert RequestKey(back, identity).draw(1, 2) == RequestKey(request, identity).draw(1, 2)
    assert back.messages == request.messages and back.limits == request.limits


@pytest.mark.parametrize(
    "error",
    [
        ConfigError("a setting"),
        StoreError("disk full"),
        ExecutorError("gone"),
        UnitLost("lost"),
        BudgetError("too much", resource="cost_usd"),
        ProviderError("no", kind="rate_limit", status=429, retry_after_s=1.5, was_sent=True),
        ProviderError("cut", kind="connection", had_output=True, spent=Usage(3, text_tokens=4)),
    ],
)
def test_an_error_comes_back_as_it_was(error: TfgrpoError) -> None:
    back = error_from_dict(json.loads(json.dumps(error_to_dict(error))))
    assert type(back) is type(error) and str(back) == str(error)
    assert {k: v for k, v in vars(back).items() if k != "errno"} == vars(error)


def test_an_unknown_class_becomes_the_root_and_no_secret_crosses() -> None:
    assert type(error_from_dict({"type": "os", "message": "x"})) is TfgrpoError
    assert type(error_from_dict({"type": "boundary", "message": "x"})) is TfgrpoError
    register("CANARY-0123456789")
    try:
        row = error_to_dict(ConfigError("with CANARY-0123456789 in it"))
    finally:
        forget_secrets()
    assert "CANARY" not in row["message"]


def test_a_workers_environment_has_no_key() -> None:
    register("known-secret-value-1")
    try:
        given = {
            "PATH": "/bin", "TOKENIZERS_PARALLELISM": "1", "MY_API_KEY": "k", "HF_TOKEN": "t",
            "DB_PASSWORD": "p", "INNOCENT": "known-secret-value-1", "AGENT_KEY_TOKEN": "a",
        }  # fmt: skip
        left = child_environment(given, ["AGENT_KEY_TOKEN"])
    finally:
        forget_secrets()
    assert set(left) == {"PATH", "TOKENIZERS_PARALLELISM", "AGENT_KEY_TOKEN"}
