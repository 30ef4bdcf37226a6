"""1,000 small runs over every verb that spends: is a cap ever passed?

Each run draws a verb, one capped resource, a width of up to 64 calls, failures before and after the
sale, random usage within the worst case, and cancellations. Every change of every ledger is looked
at: settled + reserved must not be above a cap; no reservation is granted once the seconds are
up; what the server sold must not be above a cap; nothing stays reserved at the end.

`train` and `escalate` run their judge's calls, the only ones that cost: the same verifier, journal,
retries and ledger as in the verb, without the training between them.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Awaitable, Callable, Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.learning.worlds import HELPFUL, World, critic_reply, make_tasks
from tests.learning.worlds import settings as run_settings
from tests.routing.test_router import router
from tests.store.driver import scratch
from tests.store.test_caps import MODEL, PRICES, Server
from tfgrpo.config.learn import Config
from tfgrpo.errors import BudgetError, ProviderError, TfgrpoError
from tfgrpo.escalate.journal import EscalationJournal
from tfgrpo.experience import load_artefact
from tfgrpo.learning import components
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.evaluate import evaluate_async
from tfgrpo.learning.learn import learn_async
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.messages import Message
from tfgrpo.protocols import Completion, Request, Sampling
from tfgrpo.rl import judge_calls
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rollout import Rollout, Step, Task
from tfgrpo.routing import TradeOff
from tfgrpo.routing.routed_lm import RoutedLM
from tfgrpo.search import SearchSettings, search_tree
from tfgrpo.search.proposers.lm import JudgeScorer, LMExpander
from tfgrpo.store import Budget, Journal, JournaledLM
from tfgrpo.store.budget import Ledger
from tfgrpo.verifiers import make_verifier

RUNS = 1000
QUICK = partial(RetryPolicy, first_wait_s=0.0005, most_wait_s=0.001, breaker_s=0.001, most_tries=3)
VERBS = {"learn": 1, "eval": 1, "search": 2, "route": 2, "train": 2, "escalate": 2}
"""Verb to its share of the runs."""
FULL = {
    "calls": 60.0,
    "prompt_tokens": 6_000.0,
    "completion_tokens": 1_500.0,
    "cost_usd": 0.01,
    "seconds": 0.5,
}
"""Some of what a run would use; caps are a random share of it."""


class Watch:
    """Looks at every ledger after every change."""

    def __init__(self) -> None:
        self.looks = 0
        self.violations: Counter[str] = Counter()
        self.verb = ""
        for name in ("reserve", "charge", "_close"):
            setattr(Ledger, name, self._wrapped(getattr(Ledger, name), name))

    def _wrapped(self, method: Callable[..., Any], name: str) -> Callable[..., Any]:
        def watched(ledger: Ledger, *args: Any, **amounts: Any) -> Any:
            with ledger._lock:
                result = method(ledger, *args, **amounts)
                for each in ledger._chain:
                    self._look(each, granted=name == "reserve")
            return result

        return watched

    def _look(self, ledger: Ledger, *, granted: bool) -> None:
        self.looks += 1
        for resource, limit in ledger._limits.items():
            if ledger._spent[resource] + ledger._reserved[resource] > limit:
                self.violations[f"{self.verb}: {resource}"] += 1
        seconds = ledger.budget.seconds
        if granted and seconds is not None and ledger.elapsed_s > seconds + 0.05:
            self.violations[f"{self.verb}: seconds"] += 1

    def at_end(self, ledger: Ledger, sold: dict[str, float]) -> None:
        """Look at what is left reserved and at what was sold."""
        if any(ledger.reserved.values()):
            self.violations[f"{self.verb}: left reserved"] += 1
        for resource, cap in ledger.budget.to_dict().items():
            if sold.get(resource, 0.0) > cap + 1e-9:
                self.violations[f"{self.verb}: {resource} sold"] += 1


class Seller(Server):
    """The server of the cap tests, with what it says left to the verb."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed, failing=random.Random(seed).choice([0.0, 0.1, 0.4]))

    def opener(self, say: Callable[[Request], str], spec: str = "", **options: Any) -> ScriptedLM:
        """Stands for `open_lm`."""
        server = self

        class Selling(ScriptedLM):
            async def complete(
                self, request: Request, n: int, seeds: Sequence[int | None]
            ) -> list[Completion]:
                await asyncio.sleep(server.rng.choice([0, 0, 0.001]))
                sold = server.answer(request, n)
                return [Completion(say(request), usage=reply.usage) for reply in sold]

        return Selling("", model_id=MODEL)


async def _wide(works: Iterable[Awaitable[Any]], width: int, rng: random.Random) -> None:
    """Do all works, `width` at once; some are cancelled on the way."""
    slots = asyncio.Semaphore(width)

    async def one(work: Awaitable[Any]) -> None:
        async with slots:
            await work

    tasks = [asyncio.ensure_future(one(work)) for work in works]
    cancelling = rng.choice([0.0, 0.1, 0.5])
    for task in tasks:
        if rng.random() < cancelling:
            await asyncio.sleep(rng.choice([0.0, 0.001]))
            task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception) and not isinstance(result, TfgrpoError):
            raise result


async def _cut(work: Awaitable[Any], rng: random.Random) -> None:
    """Do a work; half of the time it is cancelled after a moment."""
    task = asyncio.ensure_future(work)
    if rng.random() < 0.5:
        await asyncio.wait([task], timeout=rng.random() * 0.5)
        task.cancel()
    with contextlib.suppress(BudgetError, ProviderError, TfgrpoError, asyncio.CancelledError):
        await task


Verb = Callable[[Path, Budget, Seller, random.Random, int], Awaitable[list[Ledger]]]


def _config(folder: Path, budget: Budget, width: int) -> Config:
    return run_settings(
        folder,
        budget=budget.to_dict(),
        run={"prices": PRICES, "concurrency": width},
        tasks={"practice": 6, "gate": 4, "test": 4},
        learn={"group_size": 3, "batch": 3},
        gate={"group_size": 2, "test_group_size": 2},
        policy={"sampling": {"max_tokens": 30}},
    )


def _say(request: Request) -> str:
    return critic_reply(request.messages[0].content, HELPFUL)


async def _learn(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    config, tasks = _config(folder, budget, width), make_tasks(14)
    for _ in range(rng.choice([1, 2])):  # a second session shares the caps
        await _cut(learn_async(config, tasks=tasks, opener=partial(server.opener, _say)), rng)
    return _of_folder(folder / "run", budget)


async def _eval(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    config = _config(folder, budget, width)
    await _cut(
        evaluate_async(
            config, ARTEFACT[0], tasks=make_tasks(14), opener=partial(server.opener, _say)
        ),
        rng,
    )
    return _of_folder(folder / "run", budget)


def _of_folder(run: Path, budget: Budget) -> list[Ledger]:
    """The ledger that a next session would have."""
    if not (run / "run.db").exists():
        return []
    additive = Budget(**{k: v for k, v in budget.to_dict().items() if k != "seconds"})
    with Journal.open(run, readonly=True, budget=additive) as store:
        return [store.ledger]


async def _search(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    ledger = Ledger(Budget(**budget.to_dict(), expansions=12))
    with Journal.open(folder / "run", create=True) as store:
        raw = server.lm(prefers_n=rng.random() < 0.5)
        lm = RetryingLM(JournaledLM(raw, store, prices=PRICES), QUICK())
        settings = SearchSettings(
            samples=3, concurrency=width, lookahead=min(8, width), seed=rng.randrange(99)
        )
        expander = LMExpander(lm, sampling=Sampling(temperature=1.0, max_tokens=20))
        work = search_tree(
            Task("t", "solve it"), expander, scorer=JudgeScorer(lm), settings=settings,
            budget=ledger,
        )  # fmt: skip
        await _cut(work, rng)
    return [ledger]


async def _route(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    with Journal.open(folder / "run", create=True, budget=budget) as store:
        lms = {
            name: RetryingLM(
                JournaledLM(server.opener(lambda r: "routed"), store, prices=PRICES), QUICK()
            )
            for name in ("cheap", "dear")
        }
        routed = RoutedLM(ROUTER[0], lms)
        asks = (
            routed.complete(
                Request(
                    (Message("user", f"question {i} of many"),), sampling=Sampling(max_tokens=30)
                ),
                1,
                [i],
            )
            for i in range(80)
        )
        await _wide(asks, width, rng)
        return [store.ledger]


def _judged(verifier: Any, count: int = 80) -> Iterable[Awaitable[Any]]:
    for i in range(count):
        made = Rollout(f"r{i}", f"t{i}", (Step(Message("assistant", f"answer {i}")),))
        yield verifier.score(made, Task(f"t{i}", f"question {i}", "4"))


JUDGE = {"kind": "judge", "rubric": "right is good", "sampling": {"max_tokens": 20}}


async def _train(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    config = TrainConfig.model_validate(
        {"run": {"folder": str(folder)}, "budget": budget.to_dict(), "prices": PRICES}
    )
    judge_calls.open_lm = partial(server.opener, lambda r: "Score: 50")  # type: ignore[assignment]
    with judge_calls.JudgeCalls(config) as calls:
        verifier = make_verifier({**JUDGE, "lm": MODEL}, open_lm=calls.open)
        await _wide(_judged(verifier), width, rng)
        assert calls._store is not None
        return [calls._store.ledger]


async def _escalate(
    folder: Path, budget: Budget, server: Seller, rng: random.Random, width: int
) -> list[Ledger]:
    config = run_settings(
        folder, budget=budget.to_dict(), run={"prices": PRICES, "concurrency": width},
        verifier=JUDGE, judge={"lm": MODEL},
    )  # fmt: skip
    with EscalationJournal(folder / "escalate", {"run": 1}, "judge", budget) as journal:
        opener = partial(server.opener, lambda r: "Score: 50")
        verifier = RunComponents(config, journal.store, opener).verifier()
        await _wide(_judged(verifier), width, rng)
        return [journal.store.ledger]


RUN: dict[str, Verb] = {
    "learn": _learn,
    "eval": _eval,
    "search": _search,
    "route": _route,
    "train": _train,
    "escalate": _escalate,
}
ARTEFACT: list[Any] = []
ROUTER: list[Any] = []


def measure(runs: int) -> dict[str, Any]:
    """Run all and count."""
    logging.getLogger("tfgrpo").setLevel(logging.CRITICAL)
    # A cancelled turn never began its call.
    warnings.filterwarnings("ignore", "coroutine .* was never awaited", RuntimeWarning)
    components.RetryPolicy = QUICK  # type: ignore[misc, assignment]
    judge_calls.RetryingLM = lambda lm: RetryingLM(lm, QUICK())  # type: ignore[misc, assignment]
    watch = Watch()
    done: Counter[str] = Counter()
    stopped: Counter[str] = Counter()
    capped: Counter[str] = Counter()
    sold: Counter[str] = Counter()
    verbs = [verb for verb, share in VERBS.items() for _ in range(share)]
    with tempfile.TemporaryDirectory() as root:
        World(lesson=HELPFUL).learn(run_settings(Path(root)))
        ROUTER.append(router(TradeOff(1000.0)))
        ARTEFACT.append(load_artefact(Path(root) / "run"))
    for number in range(runs):
        rng = random.Random(number)
        watch.verb = verb = verbs[number % len(verbs)]
        resource = rng.choice([r for r in FULL if r != "seconds" or verb != "eval"])
        amount = FULL[resource] * rng.uniform(0.01, 1.2)
        if resource not in ("cost_usd", "seconds"):
            amount = max(1, round(amount))
        budget, server = Budget(**{resource: amount}), Seller(number)
        with scratch() as folder:
            width = rng.choice([1, 4, 16, 64])
            ledgers = asyncio.run(RUN[verb](Path(folder), budget, server, rng, width))
        for ledger in ledgers:
            watch.at_end(ledger, server.sold)
            stopped[verb] += ledger.remaining(resource) < amount * 0.1
        done[verb] += 1
        sold[verb] += int(server.sold["calls"])
        capped[resource] += 1
    return {
        "verbs": len(done),
        "runs": sum(done.values()),
        "violations": sum(watch.violations.values()),
        "of_verb": dict(done),
        "of_resource": dict(capped),
        "calls_sold": dict(sold),
        "nine_tenths_of_the_cap_used": dict(stopped),
        "looks": watch.looks,
        "violations_by_kind": dict(watch.violations),
    }


if __name__ == "__main__":
    asked = [int(a) for a in sys.argv[1:]] or [RUNS]
    record("caps_all_verbs", measure(*asked), "python -m tests.benchmarks.faults.caps_all_verbs")
