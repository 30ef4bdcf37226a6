"""F21, F22, F39, B10, T1, T15: what may stand in a journal, and what must not."""

from __future__ import annotations

import base64
import json
import logging
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from urllib.parse import quote

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.store.driver import scratch
from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message, ToolCall
from tfgrpo.protocols import Completion, Request
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task, Usage
from tfgrpo.runtime.redaction import forget_secrets, register
from tfgrpo.store import read_groups, write_groups
from tfgrpo.store.codec import COMPRESS_ABOVE, pack, unpack
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM

CANARY = "CANARY-7f3a9c51d2e84b60"
ANY = st.text(alphabet=st.characters(), max_size=20)  # lone surrogates, NUL, bidi marks included
NASTY = ["\x00", "\ud800", "a\udfffb", "\u202eabc", "\x1b]0;x\x07", "é\r\n\u2028", "\x00json:x", ""]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
    | ANY,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(ANY, inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


def group_of(text: str, task_id: str = "t", group_id: str = "g") -> RolloutGroup:
    step = Step(
        Message("assistant", text, (ToolCall("c", "f", text),), reasoning=text),
        (Message("tool", text, tool_call_id="c"),),
        token_ids=(1, 2),
        logprobs=(-0.5, -1.25),
    )
    done = Rollout("r0" + text, task_id, (step,), usage=Usage(calls=1, cost_usd=None))
    failed = Rollout("r1" + text, task_id).failed("refused", text)
    return RolloutGroup(
        group_id,
        Task(task_id, text, reference={"answer": text}, metadata={"m": text}),
        (done.graded(Score(0.5, text, {"part": 1.0})), failed),
        Context((ContextPart("lesson", text, source="e1"),)),
        policy_id="p" + text,
        metadata={"stage": "practice", "verifier_id": "v" + text},
    )


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "run", create=True) as opened:
        yield opened


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow])
@given(text=ANY)
def test_f21_any_text_comes_back_from_every_file_as_it_was(text: str) -> None:
    with scratch() as folder:
        check_round_trips(Path(folder), text)


def check_round_trips(folder: Path, text: str) -> None:
    group = group_of(text, task_id="t" + text, group_id="g" + text)
    with Journal.open(folder / "run", create=True) as store:
        store.record_group(group)
        store.record_decision("kind" + text, {text: [text]}, key=text)
        store.record_library("v" + text, [text])
    with Journal.open(folder / "run") as store:
        assert list(store.groups()) == list(store.groups("practice")) == [group]
        first = group.rollouts[0]
        assert store.find_rollout(first.rollout_id, "v" + text) == first
        assert store.decisions("kind" + text) == [(text, {text: [text]})]
        assert store.libraries() == [("v" + text, [text])]
    for name in ("g.jsonl", "g.jsonl.gz", "g.parquet"):
        assert write_groups(folder / name, [group, group]) == 2
        assert list(read_groups(folder / name)) == [group, group]


@pytest.mark.parametrize("text", NASTY)
async def test_f21_replies_and_spend_keep_any_text(store: Journal, text: str) -> None:
    reply = Completion(
        text, reasoning=text, tool_calls=(ToolCall(text, text, text),), model=text,
        top_logprobs=({text: -0.5},), usage=Usage(calls=1),
    )  # fmt: skip
    request = Request((Message("user", "ask " + text),))
    lm = JournaledLM(ScriptedLM([reply], model_id="scripted:" + text), store)
    assert await lm.complete(request, 1, [None]) == [reply]
    assert await lm.complete(request, 1, [None]) == [reply]
    assert [row.model for row in store.spend()] == ["scripted:" + text]


@given(JSON, st.integers(0, 2))
def test_f21_any_json_value_survives_packing_small_and_large(value: object, size: int) -> None:
    large = [value, "x" * (COMPRESS_ABOVE * size)]
    body, mark = pack(large)
    plain = json.dumps(large, separators=(",", ":"))
    assert isinstance(body, bytes) == (len(plain) > COMPRESS_ABOVE)
    assert unpack(body, mark) == large


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_f22_a_number_that_json_has_not_is_refused_by_name(store: Journal, bad: float) -> None:
    with pytest.raises(ConfigError, match="decision 'gate'"):
        store.record_decision("gate", {"difference": bad})
    with pytest.raises(ConfigError, match="library 'v1'"):
        store.record_library("v1", [bad])
    rollout = Rollout("r", "t", metadata={"x": bad})
    with pytest.raises(ConfigError, match="rollout 'r'"):
        store.record_rollout(rollout, group_id="g", verifier_id="v")
    assert store.decisions("gate") == []


async def test_f22_infinite_log_probs_do_not_lose_a_paid_reply(store: Journal) -> None:
    reply = Completion(
        "x", token_ids=(1,), logprobs=(-math.inf,), top_logprobs=({"a": -math.inf, "b": -1.0},)
    )
    lm = JournaledLM(ScriptedLM([reply]), store)
    request = Request((Message("user", "q"),))
    await lm.complete(request, 1, [None])
    kept = (await lm.complete(request, 1, [None]))[0]
    assert (kept.text, kept.token_ids, kept.logprobs) == ("x", (1,), None)
    assert kept.top_logprobs == ({"b": -1.0},)


def pieces_of(secret: str) -> set[bytes]:
    forms = {secret, quote(secret, safe="")}
    for shift in range(3):
        text = base64.b64encode(b"\0" * shift + secret.encode()).decode().rstrip("=")
        forms.add(text[(0, 2, 3)[shift] : -1])
    return {f[i : i + 6].encode() for f in forms for i in range(len(f) - 5)}


async def test_t1_no_piece_of_a_key_reaches_any_file_of_a_run(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    register(CANARY)
    try:
        folder = tmp_path / "run"
        config = {"lm": {"base_url": f"https://u:{CANARY}@host/v1?key={CANARY}"}}
        failures = [
            f"404 for https://host/v1/x?key={CANARY}",
            f"header Authorization: Bearer {CANARY}",
            "body " + base64.b64encode(f"user:{CANARY}".encode()).decode(),
            "echo of " + quote(CANARY + "&", safe="") + CANARY[3:12],
        ]
        store = Journal.open(folder, create=True, config=config)
        request = Request((Message("user", "q"),))
        for i, text in enumerate(failures):
            lm = ScriptedLM([ProviderError(text, kind="bad_reply")])
            with pytest.raises(ProviderError):
                await JournaledLM(lm, store).complete(request, 1, [i])
        lm = ScriptedLM([f"your key is {CANARY}, I read it in the environment"])
        reply = (await JournaledLM(lm, store).complete(request, 1, [99]))[0]
        assert CANARY not in reply.text
        printed = (Message("tool", f"the tool printed KEY={CANARY} and more", tool_call_id="c"),)
        attempt = Rollout("r", "t", (Step(Message("assistant", "env"), printed),))
        store.record_group(replace(group_of("x"), rollouts=(attempt,)))
        store.record_decision("step", {"why": CANARY})
        assert write_groups(folder / "g.jsonl", store.groups()) == 1
        store.abandon()  # killed: the log file of the database is left behind, too
        held = b"".join(p.read_bytes() for p in folder.iterdir()) + caplog.text.encode()
        assert held.count(b"[redacted]") >= len(failures) + 2
        assert {p for p in pieces_of(CANARY) if p in held} == set()
    finally:
        forget_secrets()


def test_t15_folder_and_files_belong_to_their_owner_alone(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "run"
    with Journal.open(folder, create=True) as store:
        store.record_decision("x", 1)
        modes = {p.name: p.stat().st_mode & 0o777 for p in folder.iterdir()}
        assert folder.stat().st_mode & 0o777 == 0o700
        ours = {"run.db", "run.db-wal", "run.db-shm", "run.db-sums", "lock", "reserve"}
        assert set(modes) == ours
        assert set(modes.values()) == {0o600}
    write_groups(tmp_path / "g.jsonl", [group_of("x")])
    assert (tmp_path / "g.jsonl").stat().st_mode & 0o777 == 0o600


def test_f39_an_empty_run_one_rollout_and_equal_rewards_have_defined_results(
    store: Journal, tmp_path: Path
) -> None:
    state = store.state()
    assert (state.rollouts, state.groups, state.library, state.spend) == (0, 0, None, ())
    assert list(store.groups()) == store.spend() == store.decisions("x") == []
    assert write_groups(tmp_path / "none.jsonl", []) == 0
    assert list(read_groups(tmp_path / "none.jsonl")) == []
    assert write_groups(tmp_path / "none.parquet", []) == 0
    assert list(read_groups(tmp_path / "none.parquet")) == []
    group = group_of("x")
    one = replace(group, rollouts=group.rollouts[:1])
    store.record_group(one)
    assert list(store.groups()) == [one]
