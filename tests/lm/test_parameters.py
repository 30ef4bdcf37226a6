"""Fields that a server refuses are learnt once per model, told once, and the run goes on."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import BudgetError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.parameters import Parameters
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.store.budget import Budget
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM
from tfgrpo.testing import Answer, Call, FaultServer, say, status

README = Sampling(temperature=0.7, max_tokens=800)
ASK = Request((Message("user", "hi"),), sampling=README)


def refusal(message: str, param: str | None = None, code: str | None = None) -> Answer:
    error = {"message": message, "type": "invalid_request_error", "param": param, "code": code}
    return status(400, {"error": error})


def gpt5(call: Call) -> Answer:
    """As gpt-5 answers."""
    if "max_tokens" in call.body:
        return refusal(
            "Unsupported parameter: 'max_tokens' is not supported with this model. Use "
            "'max_completion_tokens' instead.", "max_tokens", "unsupported_parameter")  # fmt: skip
    if call.body.get("temperature", 1) != 1:
        return refusal(
            "Unsupported value: 'temperature' does not support 0.7 with this model. Only the "
            "default (1) value is supported.", "temperature", "unsupported_value")  # fmt: skip
    return say("hello")


def refuses(name: str, text: str) -> Callable[[Call], Answer]:
    return lambda call: refusal(text) if name in call.body else say("ab STOP cd")


def ask(
    script: Any, request: Request = ASK, *, draws: int = 1, times: int = 1
) -> tuple[list[Completion], FaultServer]:
    async def run(spec: str) -> list[Completion]:
        lm = open_lm(spec)
        try:
            made = await asyncio.gather(
                *(lm.complete(request, draws, list(range(draws))) for _ in range(times))
            )
        finally:
            await lm.aclose()
        return [reply for replies in made for reply in replies]

    with FaultServer(script) as server:
        return asyncio.run(run(server.spec("gpt-5-mini"))), server


def test_c26_the_readmes_settings_work_with_two_extra_calls_in_all_and_two_warnings(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.WARNING, "tfgrpo.lm.openai")
    replies, server = ask(gpt5, times=12)
    assert [r.text for r in replies] == ["hello"] * 12
    assert server.call_count == 12 + 2
    sent = server.calls[-1].body
    assert sent["max_completion_tokens"] == 800 and "temperature" not in sent
    told = [r.message for r in caplog.records]
    assert len(told) == 2
    assert "max_tokens is sent as max_completion_tokens" in told[0]
    assert "temperature = 0.7 is left out" in told[1]


def test_several_draws_in_one_call_learn_the_same_way() -> None:
    replies, server = ask(gpt5, draws=4)
    assert len(replies) == 4 and server.call_count == 3


@pytest.mark.parametrize(
    ("name", "text", "sampling"),
    [
        ("seed", "[{'type': 'extra_forbidden', 'loc': ('body', 'seed'), 'msg': 'Extra inputs are "
         "not permitted'}]", README),
        ("stream_options", "Unknown parameter: 'stream_options'.", README),
        ("stream", "Your organization must be verified to stream this model.", README),
        ("top_p", "`temperature` and `top_p` cannot both be specified for this model.",
         Sampling(temperature=0.5, top_p=0.9)),
        ("logprobs", "Unsupported parameter: logprobs", Sampling(logprobs=True, top_logprobs=2)),
        ("reasoning_effort", "Unrecognized request argument supplied: reasoning_effort",
         Sampling(reasoning_effort="low")),
        ("temperature", "temperature is deprecated for this model", README),
        ("max_completion_tokens", "unused", README),
    ],
)  # fmt: skip
def test_other_fields_that_may_go_are_learnt_in_every_wording(
    name: str, text: str, sampling: Sampling
) -> None:
    replies, server = ask(refuses(name, text), Request(ASK.messages, sampling=sampling), times=3)
    assert len(replies) == 3 and name not in server.calls[-1].body
    assert server.call_count <= 3 + 1


def test_a_stop_text_that_the_server_refuses_is_applied_here() -> None:
    request = Request(ASK.messages, sampling=Sampling(stop=("STOP",)))
    script = refuses("stop", "Unsupported parameter: 'stop' is not supported with this model.")
    (reply,), server = ask(script, request)
    assert reply.text == "ab " and server.call_count == 2


@pytest.mark.parametrize(
    "answer",
    [
        refusal("max_tokens is too large: 800. This model supports at most 100 tokens.",
                "max_tokens", "invalid_value"),
        refusal("Invalid 'messages': not supported", "messages", "unsupported_value"),
        refusal("response_format of type json_schema is not supported", "response_format"),
        refusal("tools are not supported by this model"),
        refusal("the prompt is empty"),
        status(400, "not json: unsupported"),
        status(422, {"detail": [{"loc": ["body", "messages"], "msg": "field required"}]}),
    ],
)  # fmt: skip
def test_a_refusal_of_what_carries_meaning_stays_a_failure(answer: Answer) -> None:
    with pytest.raises(ProviderError) as caught:
        ask(answer)
    assert caught.value.kind == "bad_request"


def test_a_server_that_refuses_both_names_of_the_limit_ends_after_a_few_calls() -> None:
    def script(call: Call) -> Answer:
        name = next(n for n in call.body if "max" in n)
        other = "max_tokens" if "completion" in name else "max_completion_tokens"
        return refusal(f"Unsupported parameter: '{name}'. Use '{other}' instead.", name)

    calls: list[Call] = []
    with pytest.raises(ProviderError):
        ask(lambda call: (calls.append(call), script(call))[1])
    assert len(calls) <= 3


def test_a_field_that_the_user_wrote_is_never_left_out() -> None:
    sampling = Sampling(extra={"temperature": 0.3})
    with pytest.raises(ProviderError, match="temperature"):
        ask(gpt5, Request(ASK.messages, sampling=sampling))


@pytest.mark.parametrize("cap", [1, 2, 3, 5])
def test_what_is_learnt_counts_and_never_passes_a_cap_on_calls(tmp_path: Path, cap: int) -> None:
    async def run(spec: str) -> int:
        with Journal.open(tmp_path / "run", create=True, budget=Budget(calls=cap)) as store:
            lm = RetryingLM(JournaledLM(open_lm(spec), store))
            done = 0
            for i in range(6):
                try:
                    request = Request((Message("user", f"q{i}"),), sampling=README)
                    await lm.complete(request, 1, [0])
                    done += 1
                except BudgetError:
                    break
            await lm.aclose()
            assert store.ledger.spent["calls"] <= cap
            assert store.ledger.reserved["calls"] == 0
            assert sum(r.usage.calls for r in store.spend()) == store.ledger.spent["calls"]
            return done

    with FaultServer(gpt5) as server:
        done = asyncio.run(run(server.spec()))
        assert server.call_count <= cap and done == max(0, cap - 2)


@pytest.mark.parametrize("refuse", [True, False])
def test_a_server_that_does_not_honour_n_is_booked_call_by_call(
    tmp_path: Path, refuse: bool
) -> None:
    def script(call: Call) -> Answer | None:
        if call.n > 1 and refuse:
            return refusal("n must be 1")
        return say("x") if call.n == 1 else Answer(lambda c: say("x").render(
            Call(c.index, c.path, c.headers, {**c.body, "n": 1})))  # fmt: skip

    async def run(spec: str) -> None:
        with Journal.open(tmp_path / "run", create=True, budget=Budget(calls=5)) as store:
            lm = RetryingLM(JournaledLM(open_lm(spec), store))
            with pytest.raises(BudgetError):
                await lm.complete(ASK, 8, list(range(8)))
            await lm.aclose()
            assert store.ledger.spent["calls"] == server.call_count <= 5

    with FaultServer(script) as server:
        asyncio.run(run(server.spec()))


FIELDS = ("temperature", "top_p", "seed", "stop", "max_tokens", "messages", "tools")


@given(
    body=st.dictionaries(st.sampled_from(FIELDS), st.integers(0, 9)),
    answer=st.one_of(
        st.binary(max_size=40),
        st.builds(
            lambda m, p, c: json.dumps({"error": {"message": m, "param": p, "code": c}}).encode(),
            st.one_of(
                st.text(max_size=20), st.sampled_from([f"Unsupported: '{f}'" for f in FIELDS])
            ),
            st.none() | st.sampled_from(FIELDS),
            st.none() | st.just("unsupported_value"),
        ),
    ),
)
def test_learning_ends_and_never_touches_what_carries_meaning(
    body: dict[str, int], answer: bytes
) -> None:
    parameters = Parameters()
    for turn in range(8):
        sent = parameters.apply(body, {})
        if parameters.learn(sent, answer, {}) is None:
            break
        assert parameters.apply(body, {}) != sent, turn
    else:
        raise AssertionError("learnt for ever")
    left = parameters.apply(body, {})
    assert {n for n in ("messages", "tools") if n in body} <= set(left)


@pytest.mark.parametrize(
    "text",
    [
        "invalid request: stop is not a supported parameter",
        "this model does not accept stop",
        "stop is not a valid parameter",
        "no such field: stop",
        "参数stop不支持",
        "Der Parameter stop wird nicht unterstützt.",
        "Malformed input request: #: extraneous key [stop] is not what is asked for",
    ],
)
def test_more_wordings_of_a_refused_field_leave_it_out(text: str) -> None:
    request = Request((Message("user", "hi"),), sampling=Sampling(stop=("STOP",)))
    replies, server = ask(refuses("stop", text), request, times=1)
    assert [r.text for r in replies] == ["ab "] and server.call_count == 2


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("temperature", "invalid temperature: only 1 is allowed for this model"),
        ("temperature", "temperature must be 1 for reasoning models"),
        ("reasoning_effort", "Model grok-4 does not support parameter reasoningEffort."),
        ("top_p", "This model does not support topP."),
    ],
)
def test_a_field_is_known_in_other_spellings_and_by_the_one_value_allowed(
    name: str, text: str
) -> None:
    sampling = Sampling(temperature=0.5, top_p=0.9, reasoning_effort="low")
    replies, server = ask(refuses(name, text), Request(ASK.messages, sampling=sampling), times=3)
    assert len(replies) == 3 and server.call_count == 4 and name not in server.calls[-1].body


@pytest.mark.parametrize(
    "text", ["temperature must be 2 or less", "max_tokens must be 100 at most"]
)
def test_a_value_out_of_range_is_the_users_to_mend(text: str) -> None:
    with pytest.raises(ProviderError):
        ask(lambda call: refusal(text))
