"""Outages that pass, critics that are refused, judges whose settings count."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.learning.worlds import HELPFUL, World, settings
from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.experience import Artefact, load_artefact
from tfgrpo.learning.components import configured_verifier, with_judge_role
from tfgrpo.learning.evaluate import evaluate
from tfgrpo.learning.learn import dry_run
from tfgrpo.lm.scripted import Reply, ScriptedLM
from tfgrpo.protocols import Completion, Request
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.store.prices import PriceTable, price_help


def artefact_of(tmp_path: Path) -> Artefact:
    World(lesson=HELPFUL).learn(settings(tmp_path / "taught"))
    return load_artefact(tmp_path / "taught" / "run")


class Outage(World):
    """A world whose provider refuses some tasks while it is out."""

    out = True
    refused: frozenset[str] = frozenset()
    stage = "eval"

    def _policy(self, request: Request, seed: int | None) -> Reply:
        scope = current_scope()
        if self.out and scope.stage == self.stage and scope.task_id in self.refused:
            raise ProviderError("HTTP 400", kind="bad_request", status=400)
        return super()._policy(request, seed)


# --- outages --------------------------------------------------------------------------------------


def test_an_eval_after_an_outage_asks_the_failed_tasks_again_and_no_graded_one(
    tmp_path: Path,
) -> None:
    world, taught = Outage(), artefact_of(tmp_path)
    world.refused = frozenset({"t01", "t05"})
    config = settings(tmp_path)

    def run() -> Any:
        return evaluate(config, taught, tasks=world.tasks, opener=world.opener)

    first = run()
    assert {t for t, r in first.empty.items() if not r} == {"t01", "t05"}
    world.out = False
    world.asked.clear()
    second = run()
    assert all(second.empty.values()) and all(second.library.values())
    assert {task for _, task in world.asked} == {"t01", "t05"}
    assert {t: r for t, r in second.empty.items() if t not in world.refused} == {
        t: r for t, r in first.empty.items() if t not in world.refused
    }
    world.asked.clear()
    assert run() == second and not world.asked


def test_the_test_split_of_a_finished_run_is_asked_again_where_the_provider_failed(
    tmp_path: Path,
) -> None:
    world = Outage(lesson=HELPFUL)
    world.stage = "test"
    world.refused = frozenset(t.task_id for t in world.tasks[::3])
    first = world.learn(settings(tmp_path))
    assert first.learned.proof is not None
    missed = {t for t, r in first.learned.proof.empty.items() if not r}
    assert missed
    world.out = False
    world.asked.clear()
    second = world.learn(settings(tmp_path))
    assert second.learned.proof is not None and all(second.learned.proof.empty.values())
    assert {stage for stage, _ in world.asked} == {"test"}
    assert {task for _, task in world.asked} == missed
    assert second.learned.version == first.learned.version


def test_practice_groups_that_were_built_on_stay_as_they_were(tmp_path: Path) -> None:
    world = Outage(lesson=HELPFUL)
    world.stage = "practice"
    world.refused = frozenset(t.task_id for t in world.tasks[::4])
    first = world.learn(settings(tmp_path))
    world.out = False
    world.asked.clear()
    second = world.learn(settings(tmp_path))
    assert not world.asked and second.learned.version == first.learned.version


def test_a_judge_that_was_out_is_asked_again_over_the_replies_that_are_kept(tmp_path: Path) -> None:
    class Judged(World):
        away = True

        def opener(self, spec: str, **options: Any) -> ScriptedLM:
            if "judge" not in spec:
                return super().opener(spec, **options)

            def reply(request: Request, seed: int | None) -> Reply:
                if self.away and self.stages["judged"] % 2:
                    self.stages["judged"] += 1
                    raise ProviderError("busy", kind="bad_request")
                self.stages["judged"] += 1
                return "Score: 80"

            return ScriptedLM(reply, model_id=spec)

    world, taught = Judged(), artefact_of(tmp_path)
    config = settings(tmp_path, judge={"lm": "scripted:judge"})
    config = config.model_copy(update={"verifier": {"kind": "judge", "rubric": "right"}})
    first = evaluate(config, taught, tasks=world.tasks, opener=world.opener)
    assert any(len(r) < 4 for r in first.empty.values())
    world.away, asked = False, world.calls
    second = evaluate(config, taught, tasks=world.tasks, opener=world.opener)
    assert all(len(r) == 4 for r in (*second.empty.values(), *second.library.values()))
    assert world.calls == asked, "the policy's replies were kept"


# --- a refused critic -----------------------------------------------------------------------------


class RefusedCritic(World):
    """A critic whose calls fail, all or after some."""

    kinds: tuple[str, ...] = ("bad_request",)
    good_first = 0

    def _critic(self, request: Request, seed: int | None) -> Reply:
        self.stages["critic"] += 1
        number = self.stages["critic"]
        if number <= self.good_first:
            return super()._critic(request, seed)
        kind: Any = self.kinds[number % len(self.kinds)]
        raise ProviderError("HTTP 400: max_tokens is not supported", kind=kind, status=400)


@pytest.mark.parametrize("kind", ["bad_request", "refused", "context_too_long"])
def test_a_critic_that_is_refused_throughout_stops_the_run_as_a_policy_does(
    tmp_path: Path, kind: str
) -> None:
    world = RefusedCritic()
    world.kinds = (kind,)
    with pytest.raises(ProviderError, match="first 2 calls of the critic all failed alike") as told:
        world.learn(settings(tmp_path))
    assert "max_tokens is not supported" in str(told.value) and told.value.kind == kind
    assert world.stages["test"] == 0 and world.stages["critic"] <= 16


def test_a_critic_that_answered_once_costs_its_failed_calls_and_they_are_told_as_failures(
    tmp_path: Path,
) -> None:
    world = RefusedCritic(lesson="")
    world.good_first = 1
    result = world.learn(settings(tmp_path))
    (note,) = [n for n in result.learned.notes if "no lesson was fit" in n]
    assert "calls failed, the first with bad_request: HTTP 400" in note
    assert "cut" not in note


# --- the judge's role -----------------------------------------------------------------------------


def test_every_key_of_the_judges_role_reaches_its_calls(tmp_path: Path) -> None:
    seen: list[Request] = []

    def judge(request: Request, seed: int | None) -> Completion:
        seen.append(request)
        return Completion("Score: 70")

    def opener(spec: str, **options: Any) -> ScriptedLM:
        seen_options.update(options)
        return ScriptedLM(judge if "judge" in spec else "x", model_id=spec)

    seen_options: dict[str, Any] = {}
    role = {
        "lm": "scripted:judge",
        "options": {"extra_option": 3},
        "sampling": {"temperature": 0.3, "max_tokens": 77, "stop": ["#"], "extra": {"k": 1}},
        "timeout_s": 7.0,
        "first_token_s": 2.0,
    }
    weighted = {
        "kind": "weighted",
        "parts": {"j": {"kind": "judge", "rubric": "right"}, "e": {"kind": "exact"}},
    }
    for number, verifier in enumerate(({"kind": "judge", "rubric": "right"}, weighted)):
        seen.clear()
        world = World()
        config = settings(tmp_path / str(number), judge=role)
        config = config.model_copy(update={"verifier": verifier})
        evaluate(config, artefact_of(tmp_path / f"a{number}"), tasks=world.tasks[:2], opener=opener)
        assert seen and seen_options["extra_option"] == 3
        asked = seen[0]
        assert (asked.sampling.temperature, asked.sampling.max_tokens) == (0.3, 77)
        assert asked.sampling.stop == ("#",) and asked.sampling.extra == {"k": 1}
        assert (asked.limits.timeout_s, asked.limits.first_token_s) == (7.0, 2.0)


@pytest.mark.parametrize(
    ("verifier", "role", "is_told"),
    [
        ({"kind": "exact"}, {"timeout_s": 7.0}, True),
        ({"kind": "exact"}, {}, False),
        ({"kind": "judge", "rubric": "r"}, {"timeout_s": 7.0}, False),
    ],
)
def test_a_judges_role_that_nobody_asks_is_told(
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    verifier: dict[str, Any],
    role: dict[str, Any],
    is_told: bool,
) -> None:
    config = settings(tmp_path, judge=role).model_copy(update={"verifier": verifier})
    configured_verifier(config, lambda role: ScriptedLM("x"))
    assert ("[judge] has no effect" in caplog.text) == is_told


def test_what_the_verifier_says_itself_wins_over_the_role(tmp_path: Path) -> None:
    config = settings(tmp_path, judge={"sampling": {"temperature": 0.3}, "timeout_s": 7.0})
    own = {"kind": "judge", "rubric": "r", "limits": {"timeout_s": 3.0}}
    found = with_judge_role(own, config.judge)
    assert found["limits"] == {"timeout_s": 3.0} and found["sampling"]["temperature"] == 0.3
    assert with_judge_role({"kind": "exact"}, config.judge) == {"kind": "exact"}


@pytest.mark.parametrize("limit", [0, 5000])
def test_the_limit_of_a_critics_reply_can_be_left_to_the_provider(
    tmp_path: Path, limit: int
) -> None:
    sent: list[int | None] = []

    class Watched(World):
        def _critic(self, request: Request, seed: int | None) -> Reply:
            sent.append(request.sampling.max_tokens)
            return super()._critic(request, seed)

    Watched().learn(settings(tmp_path, critic={"sampling": {"max_tokens": limit}}))
    assert sent and set(sent) == {limit or None}


def test_an_unset_limit_reaches_the_policys_request_as_none(tmp_path: Path) -> None:
    config = settings(tmp_path, policy={"sampling": {"max_tokens": 0}})
    assert config.policy.sampling.to_sampling().max_tokens is None


def test_a_rehearsal_refuses_what_the_run_will_refuse(tmp_path: Path) -> None:
    world = World()
    config = settings(
        tmp_path, budget={"cost_usd": 1.0}, policy={"lm": "http://h/v1?api_key_env=K#m"}
    )
    with pytest.raises(ConfigError, match=r"price of 'http://h/v1\?api_key_env=K#m' is unknown"):
        dry_run(config, tasks=world.tasks, opener=world.opener)
    priced = {"http://h/v1#m": {"input": 1.0, "output": 2.0}}
    critic = {"lm": "http://h/v1#m"}
    config = settings(
        tmp_path,
        budget={"cost_usd": 1.0},
        policy={"lm": "http://h/v1?api_key_env=K#m"},
        critic=critic,
        run={"prices": priced},
    )
    plan, _ = dry_run(config, tasks=world.tasks, opener=world.opener)
    assert plan.to_dict()


@pytest.mark.parametrize(
    ("own", "asked"),
    [
        ("http://h/v1#m", "http://h/v1?api_key_env=K#m"),
        ("http://h/v1?api_key_env=K#m", "http://h/v1#m"),
        ("http://h/v1?api_key_env=K#m", "http://h/v1/?stream=false#m"),
        ("http://h/v1#m", "http://h/v1#m?stream=false"),
        ("gpt-x", "openai:gpt-x?stream=false"),
    ],
)
def test_a_price_is_found_with_and_without_the_specs_options(own: str, asked: str) -> None:
    table = PriceTable({own: {"input": 1.0, "output": 2.0}})
    found = table.find(asked)
    assert found is not None and found.output == 2.0
    assert table.find("http://other/v1#m") is None


def test_the_message_about_an_unknown_price_holds_toml_that_works() -> None:
    import tomllib

    help_text = price_help("http://h/v1?api_key_env=K#m")
    row = tomllib.loads(help_text.partition("\n")[2])
    assert PriceTable(row["run"]["prices"]).find("http://h/v1?api_key_env=K#m") is not None
