"""`judge`: the one way from an attempt to its reward, for every verb."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tfgrpo.errors import BudgetError, ProviderError, ProviderFailure, StoreError, VerifierError
from tfgrpo.messages import Message
from tfgrpo.rollout import Rollout, Score, Step, Task
from tfgrpo.runtime.call_scope import current_scope
from tfgrpo.sampling import judge
from tfgrpo.search import (
    FunctionExpander,
    ImmutableEnvironment,
    Proposal,
    SearchSettings,
    StepResult,
    UnitScorer,
    group_of,
    search_tree,
)
from tfgrpo.store.budget import Budget

ATTEMPT = Rollout("r-3", "t", (Step(Message("assistant", "4")),), sample_index=3)
TASK = Task("t", "2+2?", 4)
FATAL = {"auth", "not_found", "quota"}


@dataclass
class Raising:
    """A verifier that raises, waits, or gives 1."""

    error: BaseException | None = None
    wait_s: float = 0.0
    verifier_id: str = "mine"
    reward_range: tuple[float, float] = (0.0, 1.0)
    stage: str = ""

    def check_task(self, task: Task) -> None:
        pass

    async def score(self, rollout: Rollout, task: Task) -> Score:
        self.stage = current_scope().stage
        await asyncio.sleep(self.wait_s)
        if self.error is not None:
            raise self.error
        return Score(1.0)


@given(kind=st.sampled_from(get_args(ProviderFailure)))
def test_a_judges_provider_failure_is_the_rollouts_outcome_unless_no_call_can_succeed(
    kind: ProviderFailure,
) -> None:
    error = ProviderError("the judge is away", kind=kind)
    if kind in FATAL:
        with pytest.raises(ProviderError, match="the judge is away"):
            asyncio.run(judge(ATTEMPT, TASK, Raising(error)))
        return
    judged = asyncio.run(judge(ATTEMPT, TASK, Raising(error)))
    assert judged.outcome == "verifier_failed" and judged.reward is None
    assert "the judge is away" in judged.error and "'mine'" in judged.error


@pytest.mark.parametrize("error", [KeyError("x"), VerifierError("no"), ZeroDivisionError()])
def test_a_verifier_that_raises_gives_no_reward(error: Exception) -> None:
    judged = asyncio.run(judge(ATTEMPT, TASK, Raising(error)))
    assert (judged.outcome, judged.reward) == ("verifier_failed", None)


@pytest.mark.parametrize("error", [BudgetError("cap"), StoreError("disk full")])
def test_what_ends_a_run_passes_through(error: Exception) -> None:
    with pytest.raises(type(error)):
        asyncio.run(judge(ATTEMPT, TASK, Raising(error)))


def test_a_verification_is_timed_named_and_scoped() -> None:
    late = asyncio.run(judge(ATTEMPT, TASK, Raising(wait_s=60.0), timeout_s=0.01))
    assert late.outcome == "verifier_failed" and "no score within 0.01 s" in late.error
    verifier = Raising()
    assert asyncio.run(judge(ATTEMPT, TASK, verifier)).reward == 1.0
    assert verifier.stage == "judge"


def test_cut_attempts_are_graded_or_excluded_and_finished_ones_left_alone() -> None:
    cut = Rollout("r", "t", ATTEMPT.steps, is_truncated=True)
    assert asyncio.run(judge(cut, TASK, Raising())).reward == 1.0
    excluded = asyncio.run(judge(cut, TASK, Raising(), on_truncated="exclude"))
    assert excluded.outcome == "truncated"
    failed = ATTEMPT.failed("provider_failed", "503")
    assert asyncio.run(judge(failed, TASK, Raising(KeyError("never asked")))) is failed


@pytest.mark.parametrize("verify", ["after", "during"])
def test_a_search_keeps_its_paths_when_the_judge_is_away(verify: str) -> None:
    async def run() -> None:
        verifier = Raising(ProviderError("busy", kind="overloaded"))
        result = await search_tree(
            TASK,
            FunctionExpander(lambda ctx, node, k: [Proposal("go")]),
            ImmutableEnvironment(0, lambda s, a: StepResult(s + 1, is_terminal=True)),
            scorer=UnitScorer(),
            settings=SearchSettings(verify=verify),  # type: ignore[arg-type]
            budget=Budget(expansions=3),
            verifier=verifier,
        )
        group = await group_of(result, verifier=verifier)
        assert [r.outcome for r in group.rollouts] == ["verifier_failed"]

    asyncio.run(run())
