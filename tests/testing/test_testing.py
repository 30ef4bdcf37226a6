"""The fakes that users stand on, and the contract checks: each must catch its broken line."""

import pytest

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Rollout, Score, Usage
from tfgrpo.rollout import Task as ATask
from tfgrpo.store.codec import completion_from_dict, completion_to_dict
from tfgrpo.testing import ReplayLM, ScriptedLM, check_lm, check_policy, check_verifier

ASK = Request((Message("user", "hi"),))


@pytest.mark.parametrize("name", ["echo", "coin", "digits", "silent", "cut", "refuse"])
async def test_every_named_script_keeps_the_contract(name):
    lm = open_lm(f"scripted:{name}")
    if name in ("cut", "refuse"):
        (reply,) = await lm.complete(ASK, 1, [0])
        assert reply.finish == {"cut": "length", "refuse": "content_filter"}[name]
    else:
        await check_lm(lm, is_deterministic=True)


async def test_failing_scripts_fail_with_their_kind():
    for name, kind in (("down", "overloaded"), ("locked", "auth")):
        with pytest.raises(ProviderError) as caught:
            await open_lm(f"scripted:{name}").complete(ASK, 1, [0])
        assert caught.value.kind == kind


async def test_a_file_of_replies_is_a_model_and_its_content_its_identity(tmp_path):
    path = tmp_path / "replies.json"
    path.write_text('{"hi": ["a", "b", "c"]}', encoding="utf-8")
    lm = open_lm(f"scripted:{path}")
    texts = [r.text for r in await lm.complete(ASK, 30, list(range(30)))]
    assert set(texts) == {"a", "b", "c"}
    before = lm.identity
    path.write_text('{"hi": ["a", "b"]}', encoding="utf-8")
    assert open_lm(f"scripted:{path}").identity != before
    path.write_text("[1]", encoding="utf-8")
    with pytest.raises(ConfigError, match="object"):
        open_lm(f"scripted:{path}")


async def test_a_recording_plays_back_without_the_model(tmp_path):
    path = tmp_path / "calls.jsonl"
    recorder = ReplayLM(path, lm=ScriptedLM(lambda request, seed: f"draw {seed}"))
    first = await recorder.complete(ASK, 2, [1, 2])
    again = await recorder.complete(ASK, 1, [1])
    player = ReplayLM(path)
    assert await player.complete(ASK, 2, [1, 2]) == first
    assert await player.complete(ASK, 1, [1]) == again
    assert player.model_id == "scripted:test"
    with pytest.raises(ProviderError, match="record it again"):
        await player.complete(Request((Message("user", "changed"),)), 1, [1])


def test_a_recording_that_is_absent_or_damaged_is_a_config_error(tmp_path):
    with pytest.raises(ConfigError, match="no recording"):
        ReplayLM(tmp_path / "absent.jsonl")
    (tmp_path / "bad.jsonl").write_text("{}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="line 1"):
        ReplayLM(tmp_path / "bad.jsonl")


def test_a_completion_survives_its_json_form():
    reply = Completion(
        "a", "length", "b", token_ids=(1,), logprobs=(-0.5,), prompt_token_ids=(2,),
        top_logprobs=({"a": -0.5},), usage=Usage(1, 2, 3, 4, 5, 1, None, True), model="m",
    )  # fmt: skip
    assert completion_from_dict(completion_to_dict(reply)) == reply


@pytest.mark.parametrize(
    ("reply", "line"),
    [
        (Completion("<think>x</think>y", usage=Usage(calls=1)), "4:"),
        (Completion("x", finish="eos", usage=Usage(calls=1)), "finish"),
        (Completion("x"), "calls"),
        (Completion("x", logprobs=(0.5,), usage=Usage(calls=1)), "log-probabilities"),
        (Completion("x", token_ids=(1, 2), logprobs=(-1.0,), usage=Usage(calls=1)), "equal"),
    ],
)
async def test_check_lm_names_the_broken_line(reply, line):
    with pytest.raises(AssertionError, match=line):
        await check_lm(ScriptedLM(lambda request, seed: reply))


async def test_check_lm_catches_too_many_draws_and_other_exceptions():
    class Many(ScriptedLM):
        async def complete(self, request, n, seeds):
            return await super().complete(request, n + 1, [*seeds, 0])

    with pytest.raises(AssertionError, match="1: asked for 1"):
        await check_lm(Many("x"))
    from tfgrpo.testing.contracts import check_lm_failure

    def crash(request, seed):
        raise KeyError("x")

    with pytest.raises(AssertionError, match="KeyError"):
        await check_lm_failure(ScriptedLM(crash))
    with pytest.raises(AssertionError, match="did not fail"):
        await check_lm_failure(ScriptedLM("x"))


class _Policy:
    policy_id = "p"

    def __init__(self, make):
        self._make = make

    async def attempt(self, task, context, seed):
        return self._make(task, seed)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda t, s: Rollout("r", t.task_id), "different rollout_ids"),
        (lambda t, s: Rollout(f"r{s}", "other"), "another task"),
        (lambda t, s: Rollout(f"r{s}", t.task_id).graded(Score(1.0)), "never scores"),
        (lambda t, s: Rollout(f"r{s}", t.task_id, outcome="timed_out"), "error text"),
        (lambda t, s: None, "returned NoneType"),
        (lambda t, s: 1 / 0, "ZeroDivisionError"),
    ],
)
async def test_check_policy_names_the_broken_line(make, line):
    with pytest.raises(AssertionError, match=line):
        await check_policy(_Policy(make))


async def test_check_policy_returns_a_good_attempt():
    rollout = await check_policy(_Policy(lambda t, s: Rollout(f"r{s}", t.task_id)))
    assert rollout.rollout_id == "r0"


class _Verifier:
    verifier_id = "v"
    reward_range = (0.0, 1.0)

    def __init__(self, *rewards):
        self._rewards = list(rewards)

    def check_task(self, task):
        if task.reference is None:
            raise ConfigError("no reference")

    async def score(self, rollout, task):
        return Score(self._rewards.pop(0))


async def test_check_verifier_names_the_broken_line():
    task, rollout = ATask("t", "x", reference=1), Rollout("r", "t")
    assert await check_verifier(_Verifier(0.5, 0.5), rollout, task) == 0.5
    with pytest.raises(AssertionError, match="outside"):
        await check_verifier(_Verifier(2.0, 2.0), rollout, task)
    with pytest.raises(AssertionError, match="different reward"):
        await check_verifier(_Verifier(0.0, 1.0), rollout, task)
    with pytest.raises(AssertionError, match="4: the given task"):
        await check_verifier(_Verifier(0.0, 0.0), rollout, ATask("t", "x"))
