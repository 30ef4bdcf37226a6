"""Routing rules, fallback, sessions, exploration, costs; field case of a dead host (B11)."""

from __future__ import annotations

import math
import re
from pathlib import Path

import numpy as np
import pytest

from tfgrpo.errors import ConfigError, ProviderError
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request
from tfgrpo.routing.calibration import calibrate
from tfgrpo.routing.cascade import Cascade, StopRule
from tfgrpo.routing.costs import CostModel
from tfgrpo.routing.estimator.value_model import ValueModel
from tfgrpo.routing.records import ModelInfo, SuccessCount
from tfgrpo.routing.routed_lm import RoutedLM
from tfgrpo.routing.router import Router, RouterOptions, Session
from tfgrpo.routing.rules import Candidate, Cheapest, Guaranteed, TradeOff
from tfgrpo.runtime.cooldown import Cooldowns, NoneHealthyError
from tfgrpo.runtime.embedders import HashedNgrams

EASY, HARD = "translate the word number {}", "prove the hard theorem number {}"
CHEAP = ModelInfo("cheap", "", 0.1, 0.2)
DEAR = ModelInfo("dear", "", 10.0, 20.0)


def history(n=60):
    rows = []
    for i in range(n):
        for template, cheap in ((EASY, 1.0), (HARD, 0.0)):
            rows.append(
                SuccessCount(template.format(i), "cheap", cheap * (i % 20 != 0), output_tokens=50)
            )
            rows.append(
                SuccessCount(template.format(i), "dear", float(i % 20 != 0), output_tokens=100)
            )
    return rows


def router(rule, **options):
    fallback = options.pop("fallback", "dear")
    options.setdefault("refit", "wait")
    return Router(
        ValueModel(HashedNgrams(128)), [CHEAP, DEAR], history(), rule=rule, fallback=fallback,
        options=RouterOptions(**options),
    )  # fmt: skip


def test_the_cheapest_model_that_clears_the_target_answers():
    r = router(Cheapest(0.6))
    easy, hard = r.ask(EASY.format(7)), r.ask(HARD.format(7))
    assert (easy.model, easy.kind) == ("cheap", "rule")
    assert hard.model == "dear"
    assert "≥ 0.6" in easy.reason
    assert [c.model for c in easy.ranking] == ["cheap", "dear"]
    assert sum(easy.ranking[0].weights.values()) == pytest.approx(1.0)


def test_the_trade_off_moves_with_the_price_of_success():
    free, careful = router(TradeOff(0.0)), router(TradeOff(1000.0))
    assert free.ask(HARD.format(7)).model == "dear"
    assert careful.ask(HARD.format(7)).model == "cheap"
    assert router(TradeOff(100.0)).ask(EASY.format(7)).model == "cheap"


def test_when_nothing_qualifies_the_named_fallback_answers_and_says_it_is_dearer():
    d = router(Cheapest(0.999)).ask(HARD.format(3))
    assert (d.model, d.kind, d.is_dearer_fallback) == ("dear", "fallback", True)
    assert "no model qualifies" in d.reason
    assert "not the cheapest" in d.reason
    d = router(Cheapest(0.999), fallback="cheap").ask(HARD.format(3))
    assert (d.model, d.is_dearer_fallback) == ("cheap", False)


def test_a_model_without_evidence_never_qualifies_for_a_promise():
    r = router(Cheapest(0.5))
    r.add(ModelInfo("new", "", 0.0, 0.0))
    d = r.ask(EASY.format(7))
    new = next(c for c in d.ranking if c.model == "new")
    assert not new.qualifies
    assert "insufficient evidence: empty" in new.note
    far = r.ask("漢字 0x1f zz qq yy ww")
    assert far.kind == "fallback"


def test_a_guarantee_needs_an_open_gate():
    scores = np.random.default_rng(0).random(400)
    gate = calibrate(
        scores, (scores >= 0.5).astype(float), risk="failure", delta=0.1
    )  # fmt: skip
    r = router(Guaranteed({"cheap": gate}))
    assert r.ask(EASY.format(7)).model == "cheap"
    assert r.ask(HARD.format(7)).kind == "fallback"
    closed = calibrate(scores[:5], np.ones(5), risk="failure", delta=0.1)
    assert router(Guaranteed({"cheap": closed})).ask(EASY.format(7)).kind == "fallback"


def test_new_outcomes_change_the_choice_without_training():
    r = router(Cheapest(0.6))
    assert r.ask(EASY.format(7)).model == "cheap"
    r.record(
        *[SuccessCount(EASY.format(i), "cheap", 0.0, 3.0, output_tokens=50) for i in range(60)]
    )
    assert r.ask(EASY.format(7)).model == "dear"


def test_unknown_models_prompts_and_settings_are_named():
    r = router(Cheapest(0.6))
    with pytest.raises(ConfigError, match="'other' is unknown to this router"):
        r.record(SuccessCount("x", "cheap", 1.0), SuccessCount("x", "other", 1.0))
    assert len(r.outcomes("cheap")) == 120
    with pytest.raises(ConfigError, match="prompt is empty"):
        r.ask("  ")
    with pytest.raises(ConfigError, match="unknown"):
        r.ask("x", among=["nobody"])
    with pytest.raises(ConfigError, match="fallback"):
        router(Cheapest(0.6), fallback="nobody")
    with pytest.raises(ConfigError, match="target"):
        Cheapest(1.2)
    with pytest.raises(ConfigError, match="per_usd"):
        TradeOff(math.nan)
    with pytest.raises(ConfigError, match="each under a name"):
        Router(ValueModel(HashedNgrams(64)), [CHEAP, CHEAP], fallback="cheap")


def test_an_unknown_price_is_never_zero():
    r = Router(
        ValueModel(HashedNgrams(128)),
        [ModelInfo("mystery"), CHEAP],
        [
            SuccessCount(EASY.format(i), m, 1.0, output_tokens=9)
            for i in range(30)
            for m in ("mystery", "cheap")
        ],
        rule=TradeOff(10.0),
        fallback="cheap",
    )
    d = r.ask(EASY.format(3))
    mystery = next(c for c in d.ranking if c.model == "mystery")
    assert mystery.cost_usd is None
    assert mystery.note == "cost unknown"
    assert d.model == "cheap"


def test_a_session_stays_until_leaving_pays():
    r = router(TradeOff(100.0))
    assert r.ask(HARD.format(1), session="s").model == "dear"
    stay = r.ask(EASY.format(1), session=Session("s", 2_000_000))
    assert (stay.model, stay.kind) == ("dear", "session")
    assert "stays with dear" in stay.reason
    assert r.ask(EASY.format(1), session="s").model == "cheap"
    assert r.ask(EASY.format(1), session="other").model == "cheap"


def test_a_session_leaves_a_model_that_no_longer_clears_the_target():
    r = router(Cheapest(0.6))
    assert r.ask(EASY.format(1), session="s").model == "cheap"
    assert r.ask(HARD.format(1), session=Session("s", 10**9)).model == "dear"


def test_exploration_tries_others_and_stops_at_its_cap():
    rows = [
        SuccessCount(EASY.format(i), m, float(i % 2), output_tokens=100)
        for i in range(12)
        for m in ("cheap", "dear")
    ]
    value, cap = ValueModel(HashedNgrams(128)), 0.01
    r = Router(value, [CHEAP, DEAR], rows, rule=TradeOff(1.0), fallback="cheap",
               options=RouterOptions(explore_usd=cap))  # fmt: skip
    decisions = [r.ask(EASY.format(i)) for i in range(120)]
    tried = [d for d in decisions if d.kind == "explore" and d.model == "dear"]
    assert 1 <= len(tried) <= 5  # each costs about 0.002 dollars more
    assert 0 < r.explored_usd <= cap
    assert not [d for d in decisions[100:] if d.kind == "explore" and d.model == "dear"]
    none = Router(value, [CHEAP, DEAR], rows, rule=TradeOff(1.0), fallback="cheap")
    assert all(none.ask(EASY.format(i)).kind == "rule" for i in range(20))


def test_costs_follow_the_length_of_answers():
    rng = np.random.default_rng(0)
    rows = []
    for i in range(200):
        long = i % 2
        tokens = float(np.exp(rng.normal(6.0 if long else 3.0, 0.2)))
        prompt = (HARD if long else EASY).format(i)
        rows.append(SuccessCount(prompt, "dear", 1.0, output_tokens=tokens))
    embedder = HashedNgrams(128)
    model = CostModel.fit(DEAR, rows, embedder.embed([r.prompt for r in rows]))
    asked = [EASY.format(500), HARD.format(501)]
    costs = model.predict(asked, embedder.embed(asked))
    expected = np.exp(np.array([3.0, 6.0]) + 0.02) * 20 / 1e6 + len(asked[0]) / 4 * 10 / 1e6
    np.testing.assert_allclose(costs.expected_usd, expected, rtol=0.2)
    assert np.all(costs.high_usd > costs.expected_usd)
    paid = [SuccessCount(r.prompt, "x", 1.0, cost_usd=0.01) for r in rows[:20]]
    dollars = CostModel.fit(ModelInfo("x"), paid, embedder.embed([r.prompt for r in paid]))
    got = dollars.predict(asked, embedder.embed(asked)).expected_usd[0]
    assert got == pytest.approx(0.01, rel=0.1)


def candidate(name, mean, cost):
    return Candidate(name, mean, mean, mean, cost, cost, 10.0, "covered", {})


def test_a_cascade_stops_when_the_answer_is_good_enough_or_more_does_not_pay():
    chain = Cascade(target=0.9).order(
        [candidate("dear", 0.9, 1.0), candidate("cheap", 0.6, 0.1), candidate("silly", 0.5, 0.5)]
    )
    assert [c.model for c in chain] == ["cheap", "dear"]
    cascade = Cascade(target=0.9)
    assert cascade.stops(chain[0], 0.95, chain[1:])[0]
    assert not cascade.stops(chain[0], 0.3, chain[1:])[0]
    assert cascade.stops(chain[1], 0.1, [])[0]
    stop, why = Cascade(target=0.99, per_usd=1.0).stops(chain[0], 0.7, chain[1:])
    assert stop
    assert "would gain" in why


def test_the_stop_rule_learns_that_scores_mean_nothing():
    rng = np.random.default_rng(0)
    p = rng.uniform(0.2, 0.8, 400)
    y = (rng.random(400) < p).astype(float)
    useless = StopRule.fit(p, rng.random(400), y)
    assert abs(useless.on_score) < 0.25
    useful = StopRule.fit(p, np.where(y > 0, 0.9, 0.1), y)
    assert useful.posterior(0.5, 0.9) > 0.95
    assert useful.posterior(0.5, 0.1) < 0.05
    with pytest.raises(ConfigError, match="without NaN"):
        StopRule.fit([0.5], [math.nan], [1.0])


class Clock:
    def __init__(self):
        self.now = 0.0

    def __call__(self):
        return self.now


class Host:
    """A scripted host: raises what it is told to, counts attempts."""

    def __init__(self, name, failure=None):
        self.name, self.failure, self.attempts = name, failure, 0
        self.model_id, self.identity, self.prefers_n = name, {"name": name}, False

    async def complete(self, request, n, seeds):
        self.attempts += 1
        if self.failure is not None:
            raise self.failure
        return [Completion(f"from {self.name}") for _ in range(n)]

    async def aclose(self):
        self.failure = None


def pair(failure, **options):
    clock = Clock()
    a, b = Host("cheap", failure), Host("dear")
    cooldowns = Cooldowns(clock=clock, **options)
    lm = RoutedLM(router(TradeOff(1000.0), cooldowns=cooldowns), {"cheap": a, "dear": b})
    return lm, a, b, clock


REQUEST = Request((Message("user", EASY.format(1)),))


@pytest.mark.parametrize("kind", ["connection", "timeout", "quota", "rate_limit"])
async def test_b11_a_dead_host_is_tried_once_then_rests_then_gets_one_probe(kind):
    lm, a, b, clock = pair(ProviderError("refused", kind=kind))
    for i in range(3):
        assert (await lm.complete(REQUEST, 1, [None]))[0].text == "from dear"
        assert (a.attempts, b.attempts) == (1, i + 1)
    clock.now = 59.9
    await lm.complete(REQUEST, 1, [None])
    assert a.attempts == 1
    clock.now = 60.1
    await lm.complete(REQUEST, 1, [None])
    await lm.complete(REQUEST, 1, [None])
    assert a.attempts == 2  # one probe; its failure renewed the cooldown
    clock.now = 120.2
    a.failure = None
    assert (await lm.complete(REQUEST, 1, [None]))[0].text == "from cheap"
    assert (await lm.complete(REQUEST, 1, [None]))[0].text == "from cheap"


@pytest.mark.parametrize("kind", ["bad_request", "context_too_long", "refused"])
async def test_a_fault_of_the_request_neither_fails_over_nor_cools(kind):
    lm, a, b, _ = pair(ProviderError("400", kind=kind))
    for _ in range(2):
        with pytest.raises(ProviderError):
            await lm.complete(REQUEST, 1, [None])
    assert (a.attempts, b.attempts) == (2, 0)


async def test_a_cancelled_call_says_nothing_of_the_host():
    import asyncio

    lm, a, b, clock = pair(ProviderError("x", kind="connection"))
    await lm.complete(REQUEST, 1, [None])
    clock.now = 61.0
    a.failure = asyncio.CancelledError()
    with pytest.raises(asyncio.CancelledError):
        await lm.complete(REQUEST, 1, [None])
    a.failure = None
    assert (await lm.complete(REQUEST, 1, [None]))[0].text == "from cheap"
    assert b.attempts == 1


async def test_with_everything_cooling_every_model_is_tried_or_a_typed_error_comes_at_once():
    failure = ProviderError("refused", kind="connection")
    lm, a, b, clock = pair(failure)
    b.failure = failure
    with pytest.raises(ProviderError):
        await lm.complete(REQUEST, 1, [None])
    clock.now = 1.0
    with pytest.raises(ProviderError):
        await lm.complete(REQUEST, 1, [None])
    assert (a.attempts, b.attempts) == (2, 2)
    b.failure = None
    assert (await lm.complete(REQUEST, 1, [None]))[0].text == "from dear"
    lm, a, b, clock = pair(failure, when_none="raise")
    b.failure = failure
    with pytest.raises(ProviderError):
        await lm.complete(REQUEST, 1, [None])
    with pytest.raises(NoneHealthyError, match="every model is cooling down") as caught:
        await lm.complete(REQUEST, 1, [None])
    assert caught.value.retry_after_s == pytest.approx(60.0)
    assert (a.attempts, b.attempts) == (1, 1)


def test_failures_are_counted_before_a_cooldown_and_only_one_probe_runs_at_a_time():
    clock = Clock()
    c = Cooldowns(allowed_failures=1, clock=clock)
    failure = ProviderError("x", kind="overloaded", retry_after_s=200.0)
    assert c.failed("a", failure)
    assert c.state("a") == "healthy"
    c.failed("a", failure)
    assert c.state("a") == "cooling"
    clock.now = 199.0
    assert c.state("a") == "cooling"  # the server asked for 200 s
    clock.now = 201.0
    assert c.state("a") == "probe"
    c.started("a")
    assert c.state("a") == "cooling"
    assert c.available(["a", "b"]) == ["b"]
    c.succeeded("a")
    assert c.state("a") == "healthy"
    c = Cooldowns(clock=clock)
    c.failed("a", ProviderError("x", kind="rate_limit", retry_after_s=2.0))
    clock.now += 2.5
    assert c.state("a") == "probe"  # 2 s, though 60 s were configured
    with pytest.raises(ConfigError, match="cooldown_s"):
        Cooldowns(cooldown_s=-1.0)


async def test_a_routed_lm_needs_an_lm_for_every_model_and_tells_its_decisions():
    r = router(TradeOff(1000.0))
    with pytest.raises(ConfigError, match="'dear'"):
        RoutedLM(r, {"cheap": Host("cheap")})
    told = []
    lm = RoutedLM(
        r,
        {"cheap": Host("cheap"), "dear": Host("dear")},
        on_decision=lambda decision, used: told.append((decision.model, used)),
    )
    assert len(await lm.complete(REQUEST, 2, [None, None])) == 2
    assert told == [("cheap", "cheap")]
    assert lm.model_id == "routed:cheap,dear"
    assert set(lm.identity["models"]) == {"cheap", "dear"}
    await lm.aclose()


def test_the_pages_first_blocks_fit_a_router_and_load_it_in_two_lines(tmp_path, monkeypatch):
    page = (Path(__file__).parents[2] / "docs" / "routing.md").read_text("utf-8")
    fitting, loading, *_ = re.findall(r"^```python\n(.*?)^```$", page, re.M | re.S)
    assert len([line for line in loading.splitlines() if line and "import" not in line]) == 2
    monkeypatch.chdir(tmp_path)
    exec(compile(fitting, "docs/routing.md", "exec"), {})
    names = {}
    exec(compile(loading, "docs/routing.md", "exec"), names)
    assert names["router"].ask("translate word 99").model == "small"
