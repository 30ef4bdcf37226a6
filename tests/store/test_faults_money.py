"""F13, F37, F38, B04, scenario 10: tokens, money, caps."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.store.driver import MODEL, PRICES, CountingServer, Settings, learn, result_of, run_whole
from tfgrpo.errors import BudgetError, ConfigError, ProviderError
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope
from tfgrpo.store.budget import Budget, Ledger
from tfgrpo.store.journal import Journal
from tfgrpo.store.journaled_lm import JournaledLM, estimate_prompt_tokens
from tfgrpo.store.prices import FREE, Price, PriceTable

ASK = Request((Message("user", "how much?"),), sampling=Sampling(max_tokens=10))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "run", create=True) as opened:
        yield opened


def paid(usage: Usage) -> ScriptedLM:
    return ScriptedLM([Completion("x", usage=usage)], model_id=MODEL)


async def test_f37_cached_tokens_inside_the_prompt_count_are_billed_once(store: Journal) -> None:
    prices = {MODEL: {"input": 1.25, "cache_read": 0.625, "output": 10.0}}
    usage = Usage(
        uncached_tokens=262_960 - 257_955, cache_read_tokens=257_955, text_tokens=1_744, calls=1
    )
    reply = (await JournaledLM(paid(usage), store, prices=prices).complete(ASK, 1, [1]))[0]
    assert reply.usage.cost_usd == pytest.approx(0.184918, abs=5e-7)
    assert store.spend()[0].usage.prompt_tokens == 262_960
    assert store.ledger.spent["cost_usd"] == pytest.approx(0.184918, abs=5e-7)


def test_b04_written_tokens_are_not_charged_again_as_input() -> None:
    price = Price(input=3.0, cache_write=3.75, cache_read=0.30, output=15.0)
    usage = Usage(uncached_tokens=3, cache_write_tokens=12_304, text_tokens=550)
    assert price.cost_usd(usage) == pytest.approx(0.054399, abs=5e-7)
    assert usage.prompt_tokens == 12_307


@given(st.tuples(*[st.integers(0, 10**6)] * 5), st.tuples(*[st.integers(0, 10**6)] * 5))
def test_the_cost_of_a_sum_is_the_sum_of_costs_and_never_above_the_worst_case(
    a: tuple[int, ...], b: tuple[int, ...]
) -> None:
    price = Price(input=3.0, cache_write=3.75, cache_read=0.30, output=15.0)
    first, second = Usage(*a), Usage(*b)
    together = price.cost_usd(first + second)
    assert together == pytest.approx(price.cost_usd(first) + price.cost_usd(second))
    worst = price.worst_usd(first.prompt_tokens, first.completion_tokens)
    assert price.cost_usd(first) <= worst + 1e-12


async def test_f13_estimated_tokens_stand_apart_from_billed_ones(store: Journal) -> None:
    billed = Usage(uncached_tokens=10, text_tokens=2, calls=1)
    guessed = Usage(uncached_tokens=7, text_tokens=3, calls=1, is_estimated=True)
    lm = ScriptedLM([Completion("a", usage=billed), Completion("b", usage=guessed)], model_id=MODEL)
    journaled = JournaledLM(lm, store, prices=PRICES)
    for i in range(2):
        await journaled.complete(ASK, 1, [i])
    row = store.spend()[0]
    assert (row.usage.total_tokens, row.estimated.total_tokens) == (22, 10)
    assert row.estimated.cost_usd == pytest.approx(13e-6)


async def test_an_unknown_price_is_unknown_and_never_zero(store: Journal) -> None:
    usage = Usage(uncached_tokens=5, calls=1)
    lm = ScriptedLM([Completion("x", usage=usage)], model_id="http://a#m")
    reply = (await JournaledLM(lm, store).complete(ASK, 1, [1]))[0]
    assert reply.usage.cost_usd is None
    assert store.spend()[0].usage.cost_usd is None
    assert store.spend()[0].usage.calls == 1


def test_a_money_cap_with_an_unknown_price_is_refused_before_any_call(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True, budget=Budget(cost_usd=1)) as store:
        with pytest.raises(ConfigError, match=r"price of 'http://a#m' is unknown.*run\.prices"):
            JournaledLM(ScriptedLM("x", model_id="http://a#m"), store)
        JournaledLM(ScriptedLM("x"), store)  # on the user's own machine: free


def test_prices_come_from_config_then_package_then_litellm(monkeypatch: pytest.MonkeyPatch) -> None:
    from tfgrpo.store import prices as module

    rows = {
        "brand-new": {
            "litellm_provider": "openai",
            "input_cost_per_token": 1e-06,
            "output_cost_per_token": 2e-06,
            "cache_read_input_token_cost": 1e-07,
        },
        "gpt-4o-mini": {"litellm_provider": "openai", "input_cost_per_token": 9.0},
        "xx/unknown": {"input_cost_per_token": 0.0, "output_cost_per_token": 0.0},
    }
    monkeypatch.setattr(module, "_litellm_rows", lambda: rows)
    table = PriceTable({"gpt-5": {"input": 7, "output": 8}})
    own, package = table.find("openai:gpt-5"), table.find("openai:gpt-4o-mini")
    assert own is not None and (own.input, own.output) == (7, 8)
    assert package is not None and (package.input, package.output) == (0.15, 0.6)
    assert table.find("openai:gpt-4o-mini-2024-07-18") == package
    found = table.find("openai:brand-new")
    assert found is not None
    assert (found.input, found.output, found.cache_read) == pytest.approx((1.0, 2.0, 0.1))
    assert table.find("litellm:xx/unknown") is None
    assert table.find("litellm:elsewhere/brand-new") is None
    assert table.find("http://127.0.0.1:1/v1#gpt-4o-mini") is None
    assert PriceTable(use_litellm=False).find("openai:brand-new") is None
    assert {table.find(m) for m in ("local:smollm2-135m", "vllm:x", "scripted:y")} == {FREE}


@pytest.mark.parametrize("row", [{"input": 1}, {"input": 1, "output": -1}, {"inputs": 1}])
def test_a_bad_price_is_refused_by_name(row: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="price of 'm'"):
        PriceTable({"m": row})


def test_every_price_of_the_package_is_dated_and_plausible() -> None:
    text = (Path(__file__).parents[2] / "tfgrpo" / "store" / "prices.json").read_text()
    table = json.loads(text)
    assert table["date"] and "per million" in table["unit"]
    for name, row in table["models"].items():
        price = Price.from_dict(row, name)
        assert 0 < price.input <= price.output < 1000, name
        assert price.cache_read is None or price.cache_read < price.input, name


async def test_a_failure_that_the_server_refused_counts_as_a_call_and_costs_nothing(
    store: Journal,
) -> None:
    for kind, status in (("rate_limit", 429), ("auth", 401), ("refused", 400)):
        lm = ScriptedLM([ProviderError("no", kind=kind, status=status)], model_id=MODEL)  # type: ignore[arg-type]
        with pytest.raises(ProviderError):
            await JournaledLM(lm, store, prices=PRICES).complete(ASK, 1, [1])
    row = store.spend()[0]
    assert (row.usage.calls, row.failed_calls, row.booked.calls) == (3, 3, 0)
    assert row.usage.cost_usd == store.ledger.spent["cost_usd"] == 0.0


async def test_a_failure_that_may_be_billed_is_booked_at_its_worst_case(tmp_path: Path) -> None:
    lm = ScriptedLM([ProviderError("cut", kind="timeout")], model_id=MODEL)
    with Journal.open(tmp_path / "run", create=True) as store:
        with pytest.raises(ProviderError):
            await JournaledLM(lm, store, prices=PRICES).complete(ASK, 1, [1])
        row, spent = store.spend()[0], store.ledger.spent
    worst = (estimate_prompt_tokens(ASK) * 1.0 + 10 * 2.0) / 1e6
    assert row.booked.cost_usd == spent["cost_usd"] == pytest.approx(worst)
    assert (row.usage.calls, row.booked.calls) == (0, 1)
    with Journal.open(tmp_path / "run") as store:
        assert store.ledger.spent["cost_usd"] == pytest.approx(worst)


async def test_a_connection_that_never_stood_costs_nothing_at_all(store: Journal) -> None:
    class Dead(ScriptedLM):
        async def complete(
            self, request: Request, n: int, seeds: Sequence[int | None]
        ) -> list[Completion]:
            try:
                raise ConnectionRefusedError(111, "refused")
            except OSError as exc:
                raise ProviderError("no server", kind="connection") from exc

    with pytest.raises(ProviderError):
        await JournaledLM(Dead("", model_id=MODEL), store, prices=PRICES).complete(ASK, 1, [1])
    row = store.spend()[0]
    assert (row.usage.calls, row.booked.calls, row.failed_calls) == (0, 0, 1)
    assert store.ledger.spent["calls"] == 0


async def test_f38_forty_calls_at_once_never_pass_a_cap_and_use_it_up(tmp_path: Path) -> None:
    worst = (estimate_prompt_tokens(ASK) + 2 * 10) / 1e6
    actual = Usage(uncached_tokens=4, text_tokens=3, calls=1)  # a third of the worst case
    reply = Completion("x", usage=actual)
    lm = ScriptedLM(lambda request, seed: reply, model_id=MODEL, latency_s=0.002)
    cap = worst * 6
    with Journal.open(tmp_path / "run", create=True, budget=Budget(cost_usd=cap)) as store:
        journaled = JournaledLM(lm, store, prices=PRICES)
        results = await asyncio.gather(
            *(journaled.complete(ASK, 1, [i]) for i in range(40)), return_exceptions=True
        )
        refused = [r for r in results if isinstance(r, BudgetError)]
        done = [r for r in results if isinstance(r, list)]
        assert len(refused) + len(done) == 40 and refused and len(done) > 6
        assert {r.resource for r in refused} == {"cost_usd"}
        spent = store.ledger.spent["cost_usd"]
        assert cap - worst < spent <= cap
        assert set(store.ledger.reserved.values()) == {0.0}


def test_scenario_10_a_cap_in_mid_batch_keeps_what_is_done_and_a_higher_cap_goes_on(
    tmp_path: Path,
) -> None:
    given, server = Settings(), CountingServer()
    capped = Budget(calls=7)
    with Journal.open(tmp_path / "run", create=True, budget=capped) as store:
        with pytest.raises(BudgetError, match="calls"):
            asyncio.run(learn(store, server, given))
        assert store.ledger.spent["calls"] == store.state().rollouts == 7
    with (
        Journal.open(tmp_path / "run", budget=capped) as store,  # the cap survives a resume
        pytest.raises(BudgetError, match="7 spent"),
    ):
        asyncio.run(learn(store, server, given))
    with Journal.open(tmp_path / "run") as store:
        asyncio.run(learn(store, server, given))
        result = result_of(store)
    assert set(server.received.values()) == {1}
    assert result == run_whole(tmp_path / "whole", CountingServer(), given)


async def test_spend_is_told_by_stage_and_model_with_hits(tmp_path: Path) -> None:
    with Journal.open(tmp_path / "run", create=True) as store:
        for stage, model in (("practice", "scripted:a"), ("judge", "scripted:b")):
            lm = JournaledLM(ScriptedLM("x", model_id=model), store)
            with call_scope(CallScope(stage=stage)):
                for _ in range(3):
                    await lm.complete(ASK, 1, [1])
        rows = [(r.stage, r.model, r.usage.calls, r.hits) for r in store.spend()]
    assert rows == [("judge", "scripted:b", 1, 2), ("practice", "scripted:a", 1, 2)]
    with Journal.open(tmp_path / "run", readonly=True) as store:
        assert [(r.stage, r.model, r.usage.calls, r.hits) for r in store.spend()] == rows
        assert json.loads(json.dumps([r.to_dict() for r in store.spend()]))[0]["hits"] == 2


async def test_time_counts_over_sessions(tmp_path: Path) -> None:
    now = [0.0]
    for _ in range(2):
        with Journal.open(
            tmp_path / "run", create=True, budget=Ledger(Budget(seconds=25), clock=lambda: now[0])
        ) as store:
            now[0] += 10
            assert store.ledger.remaining("seconds") <= 15
        now[0] += 1000  # nobody was running
    with Journal.open(tmp_path / "run", budget=Ledger(clock=lambda: now[0])) as store:
        assert store.ledger.spent["seconds"] == pytest.approx(20)
        assert store.state().seconds == pytest.approx(20)
