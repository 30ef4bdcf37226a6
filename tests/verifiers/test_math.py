"""Mathematics in worker processes: right order, wall clock, references checked before spending."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.verifiers.rows import said, task
from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.verifiers import Math
from tfgrpo.verifiers.workers import WorkerPool

pytest.importorskip("math_verify")
pytestmark = pytest.mark.real


@pytest.fixture(scope="module")
def judge() -> Iterator[Math]:
    made = Math(workers=1)
    yield made
    made.close()


@pytest.mark.parametrize(
    ("reference", "answer", "reward"),
    [
        ("1/2", r"so \boxed{0.5}", 1.0),
        (r"\frac{3}{4}", r"\boxed{\frac{6}{8}}", 1.0),
        ("x^2+1", r"\boxed{1+x^2}", 1.0),
        ("(1,2)", "the point $(1,2)$", 1.0),
        ("5", r"\boxed{4}, no: \boxed{5}", 1.0),
        ("4", r"\boxed{4}, no: \boxed{5}", 0.0),
        (7, "it is 7", 1.0),
        ("5e5", r"\boxed{500000}", 1.0),
        ("5e5", r"\boxed{25e}", 0.0),
        ("6.02e23", r"\boxed{6.02 \times 10^{23}}", 1.0),
        ("1000", r"\boxed{1e3}", 1.0),
        ("1000", "The answer is $1e3$.", 1.0),
        ("0.00012", r"\boxed{1.2E-4}", 1.0),
        ("2e", r"\boxed{2e}", 1.0),
        ("e^2", r"\boxed{e^2}", 1.0),
        ("2602", r"\boxed{2 602}", 1.0),
        ("9500", r"\boxed{$9{,}500}", 1.0),
        ("3.5", r"\boxed{3\frac{1}{2}}", 1.0),
        ("4", r"\boxed{\frac{3}{4}}", 0.0),
        ("7", "I do not know", 0.0),
        ("7", "", 0.0),
        ("5", "$x = 5$", 1.0),  # an assignment is resolved on the side of the answer alone
    ],
)
async def test_answers_are_compared_as_mathematics(
    judge: Math, reference: str, answer: str, reward: float
) -> None:
    judge.check_task(task(reference))
    assert (await judge.score(said(answer), task(reference))).reward == reward


@pytest.mark.parametrize("reference", [None, "", True, r"\frac{", "north pole!!", [1]])
def test_a_reference_that_is_no_mathematics_is_found_before_spending(
    judge: Math, reference: object
) -> None:
    with pytest.raises(ConfigError, match="t1"):
        judge.check_task(task(reference))


@given(st.integers(1, 999), st.integers(0, 99), st.integers(-9, 30))
@settings(max_examples=40)
def test_e_notation_of_either_side_is_a_power_of_ten(judge: Math, n: int, d: int, e: int) -> None:
    short, long = f"{n}.{d:02}e{e}", rf"{n}.{d:02} \times 10^{{{e}}}"
    for reference, answer in ((short, long), (long, short)):
        assert asyncio.run(judge.score(said(rf"\boxed{{{answer}}}"), task(reference))).reward == 1.0


async def test_an_endless_comparison_is_a_failure_and_the_next_one_works() -> None:
    judge = Math(timeout_s=3.0, workers=1)
    try:
        judge.check_task(task("5"))
        with pytest.raises(VerifierError, match="no result within 3 s"):
            await judge.score(said(r"\boxed{9^{9^{9^{9^{9}}}}}"), task(r"\sin(9^{9^{9^{9}}})"))
        assert (await judge.score(said("5"), task("5"))).reward == 1.0
    finally:
        judge.close()


async def test_a_pool_is_reused_and_safe_at_once(judge: Math) -> None:
    before = judge._pool.starts
    answers = [said(rf"\boxed{{{i}}}") for i in range(20)]
    scores = await asyncio.gather(*(judge.score(a, task("5")) for a in answers))
    assert [s.reward for s in scores] == [float(i == 5) for i in range(20)]
    assert judge._pool.starts == max(1, before)


def test_a_dead_or_babbling_worker_is_replaced() -> None:
    script = (
        "import json, sys\nprint('{}', flush=True)\n"
        "for line in sys.stdin:\n"
        "    say = json.loads(line)['say']\n"
        "    if say == 'die': sys.exit(3)\n"
        "    print(say, flush=True)\n"
    )
    pool = WorkerPool([sys.executable, "-c", script], 1, "worker")
    try:
        assert pool.ask({"say": '{"a": 1}'}, 10) == {"a": 1}
        with pytest.raises(VerifierError, match="died"):
            pool.ask({"say": "die"}, 10)
        for nonsense in ("hello", "[1]"):
            with pytest.raises(VerifierError, match="unreadable"):
                pool.ask({"say": nonsense}, 10)
        assert pool.ask({"say": '{"a": 2}'}, 10) == {"a": 2}
        assert pool.starts == 4
    finally:
        pool.close()


def test_references_of_a_public_set_can_be_parsed(judge: Math) -> None:
    shared = Path(os.environ.get("TFGRPO_SHARED", "../shared"))
    rows = shared / "data/math/math500/math500.jsonl"
    if not rows.is_file():
        pytest.skip(f"no data at {rows}")
    answers = [json.loads(line)["answer"] for line in rows.read_text().splitlines()[:200]]
    refused = []
    for answer in answers:
        try:
            judge.check_task(task(answer))
        except ConfigError:
            refused.append(answer)
    assert len(refused) <= 4, refused
