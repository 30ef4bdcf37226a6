"""F02 to F34, T8 and T14 through the whole stack: client, journal, retries, sampler, verifier.

Parts are checked where they live; here it counts what a run makes of a fault: which outcome, what
is scored, what is asked again, what is left behind. Time is injected; over sockets limits are
short.
"""

from __future__ import annotations

import ast
import asyncio
import itertools
import logging
import resource
import sys
import time
import tomllib
from collections.abc import Callable
from email.utils import formatdate
from pathlib import Path

import pytest

from tfgrpo.cli import start as start_command
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.lm import open_lm
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.policies.chat import ChatPolicy, FunctionPolicy
from tfgrpo.protocols import LM, Limits, Request, Sampling
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.runtime.syntax import syntax_tree
from tfgrpo.sampling import GroupSpec, Sampler, SampleSettings
from tfgrpo.store import Journal, JournaledLM, Ledger
from tfgrpo.testing import Answer, FaultServer, choices, hang, raw, say, status

ROOT = Path(__file__).parents[2]
PARTS = ("tfgrpo", "search", "rl", "routing")
ASK = Request((Message("user", "q"),), sampling=Sampling(max_tokens=5))


class Clock:
    """Time that passes only where somebody sleeps."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    async def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds
        await asyncio.sleep(0)


class One:
    """Reward 1 for any answer."""

    verifier_id = "one"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(1.0)


def tasks(n: int) -> list[Task]:
    return [Task(f"t{i}", f"q{i}") for i in range(n)]


def stack(lm: LM, store: Journal, clock: Clock, **policy: float) -> RetryingLM:
    return RetryingLM(
        JournaledLM(lm, store),
        RetryPolicy(**policy),  # type: ignore[arg-type]
        limiter=AdaptiveLimiter(clock=clock),
        clock=clock,
        sleep=clock.sleep,
    )


def outcomes(store: Journal) -> list[str]:
    return [r.outcome for g in store.groups() for r in g.rollouts]


@pytest.mark.real
@pytest.mark.parametrize(
    ("hint", "least", "most"),
    [
        (lambda: {"retry_after": formatdate(time.time() + 5, usegmt=True)}, 3.0, 5.5),
        (lambda: {"retry_after": "1.25"}, 1.25, 1.375),
        (lambda: {"retry_after_ms": "700"}, 0.7, 0.77),
        (lambda: {"retry_after": "soon"}, 0.25, 0.5),
        (lambda: {"retry_after": "-7"}, 0.25, 0.5),
        (lambda: {"retry_after": "nan"}, 0.25, 0.5),
    ],
)
async def test_f02_any_spelling_of_a_hint_is_waited_for_and_garbage_means_normal_backoff(
    tmp_path: Path, hint: Callable[[], dict[str, str]], least: float, most: float
) -> None:
    clock, seen = Clock(), []

    def script(call: object) -> Answer:
        seen.append(call)
        busy = status(429, {"error": {"message": "slow down"}}, **hint())
        return busy if len(seen) == 1 else say("fine")

    with FaultServer(script) as server, Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(open_lm(server.spec()), store, clock)
        groups = await Sampler(ChatPolicy(lm), One(), recorder=store).groups(tasks(1), GroupSpec(1))
        await lm.aclose()
    assert groups[0].rewards_G == (1.0,)
    assert len(clock.slept) == 1 and least <= clock.slept[0] <= most


async def test_f07_a_prompt_that_is_too_long_marks_its_rollout_and_is_never_sent_again_unchanged(
    tmp_path: Path,
) -> None:
    clock = Clock()

    def script(request: Request, seed: int | None) -> str | ProviderError:
        if request.messages[-1].content == "q1":
            return ProviderError("9 of 8 tokens", kind="context_too_long", status=400)
        return "fine"

    raw_lm = ScriptedLM(script)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(raw_lm, store, clock)
        await Sampler(ChatPolicy(lm), One(), recorder=store).groups(tasks(3), GroupSpec(2))
        found = {g.task.task_id: [r.outcome for r in g.rollouts] for g in store.groups()}
        kinds = [r.metadata.get("provider_kind") for g in store.groups() for r in g.rollouts]
    assert found["t1"] == ["provider_failed"] * 2
    assert found["t0"] == found["t2"] == ["graded"] * 2
    assert kinds.count("context_too_long") == 2
    assert len(raw_lm.requests) == 6 and clock.slept == []


@pytest.mark.real
@pytest.mark.parametrize(
    "answer", [say("", finish="content_filter"), say("a half", finish="content_filter")]
)
async def test_f08_a_refused_task_has_no_reward_in_either_arm_of_a_comparison(
    tmp_path: Path, answer: Answer
) -> None:
    from tfgrpo.statistics import paired_difference

    def script(call: object) -> Answer | None:
        return answer if getattr(call, "text", "").endswith("q1") else say("fine")

    with FaultServer(script) as server, Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(open_lm(server.spec()), store, Clock())
        sampler = Sampler(ChatPolicy(lm), One(), recorder=store)
        arms = [await sampler.groups(tasks(4), GroupSpec(2, scope=arm)) for arm in ("base", "new")]
        await lm.aclose()
        assert outcomes(store).count("refused") == 4
    scores = [{g.task.task_id: g.rewards_G for g in arm if g.rewards_G} for arm in arms]
    assert all(set(arm) == {"t0", "t2", "t3"} for arm in scores)
    assert paired_difference(*scores, n_boot=50).n_tasks == 3


async def test_f09_a_dead_endpoint_is_left_alone_and_probed_once_a_minute(tmp_path: Path) -> None:
    clock, asked = Clock(), []

    def script(request: Request, seed: int | None) -> str | ProviderError:
        asked.append(clock.now)
        if clock.now < 150:
            return ProviderError("connection refused", kind="connection")
        return "fine"

    with Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(ScriptedLM(script), store, clock, breaker_after=4, deadline_s=900, most_tries=99)
        settings = SampleSettings(concurrency=4)
        await Sampler(ChatPolicy(lm), One(), settings, recorder=store).groups(
            tasks(4), GroupSpec(3)
        )
        assert outcomes(store) == ["graded"] * 12
    dead = [at for at in asked if at < 150]
    opened = sorted(dead)[3]
    probes = [at for at in dead if at > opened + 30]
    assert len(dead) <= 4 + 3 + 3  # what opened the circuit, what was in flight, the probes
    assert all(b - a >= 30 for a, b in itertools.pairwise(probes)), dead


async def test_f09_a_circuit_that_stays_open_ends_calls_with_the_cause(tmp_path: Path) -> None:
    clock = Clock()
    dead = ProviderError("connection refused", kind="connection")
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(ScriptedLM(lambda r, s: dead), store, clock, breaker_after=3, deadline_s=40)
        with pytest.raises(ProviderError, match="first 5 rollouts all failed alike") as caught:
            await Sampler(ChatPolicy(lm), One(), recorder=store).groups(tasks(8), GroupSpec(2))
        assert caught.value.kind == "connection"
        assert "graded" not in outcomes(store)


@pytest.mark.real
@pytest.mark.parametrize(
    ("answer", "limits", "outcome", "words"),
    [
        (say("long " * 40).drip(0.05), Limits(timeout_s=0.3), "timed_out", "limits.timeout_s"),
        (hang(), Limits(30.0, first_token_s=0.2), "timed_out", "limits.first_token_s"),
        (raw(b"<html>busy</html>", content_type="text/html"), Limits(), "provider_failed", "busy"),
        (raw(b""), Limits(), "provider_failed", "empty"),
        (choices(), Limits(), "provider_failed", "choices"),
        (say("x" * 400_000), Limits(max_reply_bytes=50_000), "provider_failed", "max_reply_bytes"),
    ],
    ids=["f10-drip", "f11-first-token", "f12-page", "f12-nothing", "f12-no-choice", "f20-huge"],
)
async def test_f10_f11_f12_f20_a_reply_that_is_none_costs_its_rollout_and_never_scores(
    tmp_path: Path, answer: Answer, limits: Limits, outcome: str, words: str
) -> None:
    def script(call: object) -> Answer | None:
        return answer if getattr(call, "text", "").endswith("q1") else say("fine")

    with FaultServer(script) as server, Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(open_lm(server.spec()), store, Clock(), most_tries=2)
        policy = ChatPolicy(lm, limits=limits)
        await Sampler(policy, One(), recorder=store).groups(tasks(2), GroupSpec(1))
        await lm.aclose()
        made = {g.task.task_id: g.rollouts[0] for g in store.groups()}
        run = (tmp_path / "run").iterdir()
        size = sum(f.stat().st_size for f in run if f.name != "reserve")
    assert made["t0"].reward == 1.0
    assert (made["t1"].outcome, made["t1"].reward) == (outcome, None)
    assert words in made["t1"].error
    assert size < 300_000  # nothing of a huge reply is kept


@pytest.mark.real
@pytest.mark.parametrize("strict", [False, True])
async def test_f15_another_model_is_recorded_and_warned_of_once_or_refused(
    tmp_path: Path, strict: bool, caplog: pytest.LogCaptureFixture
) -> None:
    server = FaultServer(say("fine", model="cheaper"))
    with server, Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(open_lm(server.spec("dear"), strict_model=strict), store, Clock(), most_tries=1)
        sampler = Sampler(ChatPolicy(lm), One(), recorder=store)
        if strict:
            with pytest.raises(ProviderError, match="cheaper"):
                await sampler.groups(tasks(6), GroupSpec(1))
        else:
            await sampler.groups(tasks(3), GroupSpec(2))
        await lm.aclose()
        kept = store._writer.read("SELECT DISTINCT model FROM results WHERE kind = 'ok'")
        graded = outcomes(store).count("graded")
    told = [
        r for r in caplog.records if "cheaper" in r.getMessage() and r.name != "tfgrpo.lm.retry"
    ]
    assert (kept, graded, len(told)) == (([], 0, 0) if strict else ([("cheaper",)], 6, 1))


async def test_f27_a_day_that_jumps_changes_no_wait_no_limit_and_no_duration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wall = [1.7e9]

    def jumping() -> float:
        wall[0] += 86_400 if len(calls) % 2 else -86_400
        return wall[0]

    calls: list[int] = []

    def script(request: Request, seed: int | None) -> str | ProviderError:
        calls.append(1)
        if len(calls) == 1:
            return ProviderError("busy", kind="rate_limit", status=429, retry_after_s=2.0)
        return "fine"

    monkeypatch.setattr(time, "time", jumping)
    clock = Clock()
    with Journal.open(tmp_path / "run", create=True, budget=Ledger(clock=clock)) as store:
        lm = stack(ScriptedLM(script), store, clock)
        groups = await Sampler(ChatPolicy(lm), One(), recorder=store).groups(tasks(3), GroupSpec(3))
        assert store.ledger.spent["seconds"] == pytest.approx(clock.now)
        assert 0 <= store.spend()[0].duration_s < 60
    assert len(clock.slept) == 1 and 2.0 <= clock.slept[0] <= 2.2
    assert all(0 <= r.duration_s < 60 for g in groups for r in g.rollouts)
    assert [r.outcome for g in groups for r in g.rollouts] == ["graded"] * 9


async def test_f30_a_dead_trace_collector_changes_nothing_of_a_run(tmp_path: Path) -> None:
    pytest.importorskip("opentelemetry.sdk", reason="needs the otel extra")
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor, SpanExporter

    from tfgrpo.store.tracing import TracedLM

    tried: list[int] = []

    class Dead(SpanExporter):
        def export(self, spans: object) -> object:  # type: ignore[override]
            tried.append(1)
            raise ConnectionError("the collector is down")

    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(Dead()))
    rewards = []
    for name, lm in (
        ("plain", ScriptedLM(lambda r, s: f"{s}")),
        ("traced", TracedLM(ScriptedLM(lambda r, s: f"{s}"), provider.get_tracer("test"))),
    ):
        with Journal.open(tmp_path / name, create=True) as store:
            sampler = Sampler(ChatPolicy(stack(lm, store, Clock())), One(), recorder=store)
            await sampler.groups(tasks(4), GroupSpec(3))
            rewards.append([(g.task.task_id, g.rewards_G) for g in store.groups()])
            assert store.spend()[0].usage.calls == 12
    assert rewards[0] == rewards[1] and len(tried) == 12


@pytest.mark.skipif(sys.platform == "win32", reason="no file limit on Windows")
async def test_f32_the_width_is_capped_below_the_file_limit_with_a_note(
    caplog: pytest.LogCaptureFixture,
) -> None:
    most = [0]
    running = [0]

    async def act(prompt: str, context: object) -> str:
        running[0] += 1
        most[0] = max(most[0], running[0])
        await asyncio.sleep(0.001)
        running[0] -= 1
        return "x"

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    try:
        settings = SampleSettings(concurrency=500, probe=0)
        sampler = Sampler(FunctionPolicy(act, policy_id="p"), One(), settings)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await sampler.groups(tasks(300), GroupSpec(1))
    assert most[0] == 96
    assert "concurrency 500 cut to 96" in caplog.text


async def test_f33_one_rollout_that_raises_leaves_its_siblings_and_closes_the_group(
    tmp_path: Path,
) -> None:
    def act(prompt: str, context: object, seed: int) -> str:
        if seed in bad:
            raise RuntimeError("a bug in the agent")
        return "x"

    from tfgrpo.runtime.canonical import derive_seed

    bad = {derive_seed(0, "t0", 2)}
    with Journal.open(tmp_path / "run", create=True) as store:
        sampler = Sampler(FunctionPolicy(act, policy_id="p"), One(), recorder=store)
        groups = await asyncio.wait_for(sampler.groups(tasks(3), GroupSpec(4)), 30)
        assert outcomes(store).count("policy_failed") == 1
        assert len(list(store.groups())) == 3
    assert [len(g.rollouts) for g in groups] == [4, 4, 4]
    assert [len(g.graded) for g in groups] == [3, 4, 4]


class Failing(One):
    """Fails for good at the third score; the others are slow."""

    verifier_id = "failing"

    def __init__(self) -> None:
        self.begun = self.ended = 0

    async def score(self, rollout: Rollout, task: Task) -> Score:
        self.begun += 1
        try:
            if self.begun == 3:
                raise ProviderError("the judge's key is wrong", kind="auth", status=401)
            await asyncio.sleep(0.02)
            return Score(1.0)
        finally:
            self.ended += 1


@pytest.mark.parametrize("cancelled", [False, True])
async def test_f34_scoring_siblings_have_ended_before_the_error_leaves(
    tmp_path: Path, cancelled: bool
) -> None:
    verifier = Failing()
    if cancelled:
        verifier.begun = 100
    with Journal.open(tmp_path / "run", create=True) as store:
        policy = ChatPolicy(JournaledLM(ScriptedLM(lambda r, s: f"{s}"), store))
        settings = SampleSettings(concurrency=8, probe=0)
        sampler = Sampler(policy, verifier, settings, recorder=store)
        work = asyncio.create_task(sampler.groups(tasks(8), GroupSpec(4)))
        if cancelled:
            await asyncio.sleep(0.01)
            work.cancel()
        with pytest.raises(asyncio.CancelledError if cancelled else ProviderError):
            await work
        assert verifier.ended == verifier.begun - (100 if cancelled else 0)
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left
        before = store.state().rollouts
        await asyncio.sleep(0.05)
        assert store.state().rollouts == before < 32
        assert set(store.ledger.reserved.values()) == {0.0}


def test_t8_no_module_reads_a_pickle_or_evaluates_text() -> None:
    banned = {"pickle", "cPickle", "marshal", "shelve", "dill", "joblib", "cloudpickle"}
    sandbox = (
        ROOT / "tfgrpo" / "verifiers" / "code" / "cell_runner.py"
    )  # runs candidates in a sandbox
    files = [f for part in PARTS for f in (ROOT / part).rglob("*.py")]
    assert len(files) > 80
    for path in files:
        for node in ast.walk(syntax_tree(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                assert not banned & {a.name.split(".")[0] for a in node.names}, path
            elif isinstance(node, ast.ImportFrom):
                assert (node.module or "").split(".")[0] not in banned, path
            elif isinstance(node, ast.Call):
                name = ast.unparse(node.func)
                assert name not in {"torch.load", "yaml.load", "numpy.load"}, (path, name)
                assert path == sandbox or name not in {"eval", "exec", "__import__"}, (path, name)


def requirements() -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    rows = list(project["dependencies"])
    for extra in project["optional-dependencies"].values():
        rows += extra
    return [row for row in rows if not row.startswith("tfgrpo")]


def test_t14_no_version_with_a_known_hole_is_allowed() -> None:
    from packaging.requirements import Requirement

    bad = {
        "litellm": ("1.82.7", "1.82.8", "1.83.0"),
        "torch": ("2.5.1", "2.9.1"),  # reading weights could run code
        "transformers": ("4.40.0",),
        "openai": ("1.0.0",),
    }
    rows = [Requirement(row) for row in requirements()]
    assert {r.name for r in rows} >= set(bad)
    for row in rows:
        for version in bad.get(row.name, ()):
            assert not row.specifier.contains(version), (row.name, version)
        assert row.url is None, row
    checkers = {"types-jsonschema"}
    assert all(
        any(s.operator in (">=", "==", "~=") for s in r.specifier)
        for r in rows
        if r.name not in checkers
    )


def test_t14_doctor_names_a_start_up_file_that_nobody_knows_and_a_bad_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    site = tmp_path / "site-packages"
    site.mkdir()
    (site / "paths.pth").write_text("/somewhere/else\n")
    monkeypatch.setattr(sys, "path", [str(site)])
    monkeypatch.setattr(start_command, "_version", lambda name: "1.0")
    monkeypatch.setattr(start_command, "_embedded_state", lambda: "not looked for")
    start_command.doctor(None)
    assert "no problem found" in capsys.readouterr().out
    (site / "litellm_init.pth").write_text("import os; os.system('true')\n")
    monkeypatch.setattr(start_command, "_version", lambda name: "1.82.8")
    with pytest.raises(ConfigError) as caught:
        start_command.doctor(None)
    assert "litellm_init.pth runs at every interpreter start" in str(caught.value)
    assert "litellm 1.82.8 was compromised" in str(caught.value)
    assert "paths.pth" not in str(caught.value)


async def test_f05_one_log_line_a_minute_and_not_one_a_call(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()

    def script(request: Request, seed: int | None) -> str | ProviderError:
        if clock.now < 120:
            return ProviderError("overloaded", kind="overloaded", status=503)
        return "fine"

    caplog.set_level(logging.WARNING)
    with Journal.open(tmp_path / "run", create=True) as store:
        lm = stack(ScriptedLM(script), store, clock, most_tries=999, deadline_s=900)
        await Sampler(ChatPolicy(lm), One(), recorder=store).groups(tasks(4), GroupSpec(4))
        assert outcomes(store) == ["graded"] * 16
        failed = store.spend()[0].failed_calls
    assert 1 <= len(caplog.records) <= 4 < failed
