"""One visit's work: run the node's action, ask for next actions, run and score the children.

Results are put into the ticket's `VisitResult` and logged as they arrive, so that a visit that is
stopped half-way keeps what was paid for. Tool errors, invalid calls and failing scorers are
outcomes.

Does not know slots, tickets' order or budgets (`driver.py`). Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    PolicyError,
    ProviderError,
    StoreError,
    TfgrpoError,
    boundary,
)
from tfgrpo.rollout import Usage
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.sampling import judge
from tfgrpo.search.algorithms.protocol import VisitRequest
from tfgrpo.search.environments.protocol import StepResult
from tfgrpo.search.node import Node, Proposal, action_name
from tfgrpo.search.paths import rollout_of
from tfgrpo.search.scorers.scorer import SearchContext
from tfgrpo.search.settings import SearchJob
from tfgrpo.search.state import NO_PROGRESS, SearchState, VisitResult
from tfgrpo.store.booking import book_failure
from tfgrpo.store.budget import Reservation

if TYPE_CHECKING:
    import asyncio

__all__ = ["NOT_RUN", "Counts", "Ticket", "Worker"]

NOT_RUN = "(not run: irreversible; it runs when the plan is carried out)"
"""Observation of an irreversible step in a search; `carry_out` runs it."""


@dataclass(slots=True)
class Ticket:
    """A visit that has been selected, and what there is of it."""

    number: int
    work: VisitRequest
    first_sample: int
    k: int
    visit: VisitResult
    reservation: Reservation | None = None
    task: asyncio.Task[None] | None = None
    is_whole: bool = False
    """False while running, and for a visit that was stopped."""
    extra_calls: int = 0
    """Calls beyond those that its usage reports: failed ones that were tried again."""

    is_at_worst: bool = False
    """True where a call may have been billed and nobody knows: the visit costs all that it held."""
    lost: dict[str, float] = field(default_factory=dict)
    """What calls may have been billed that failed and were tried again, beside the calls."""

    def allow_call(self, is_reported: bool, failure: ProviderError | None) -> None:
        """Hold one more call of this visit, and what the one before it may have been billed; raises
        `BudgetError` where so much is not left."""
        if self.reservation is None:
            return
        perhaps = {} if failure is None else self._share(failure)
        try:
            self.reservation.extend(calls=1, **perhaps)
        except BudgetError:
            if failure is not None:
                self.take_failure("propose", failure)
            raise
        self.extra_calls += not is_reported
        self._lose(perhaps)

    def take_lost(self, failure: ProviderError) -> None:
        """Book one of the promised calls that failed for good while others went on, by what it can
        have cost."""
        perhaps = self._share(failure)
        if perhaps or book_failure(failure, duration_s=0.0, price=None).usage.calls:
            self.extra_calls += 1
        self._lose(perhaps)

    def _share(self, failure: ProviderError) -> dict[str, float]:
        """Return what of all that is held one failed call may have been billed, calls aside."""
        if self.reservation is None or not _may_be_billed(failure):
            return {}
        held = self.reservation.amounts
        calls = max(1.0, held.get("calls", 1.0) - self.extra_calls)
        names = ("prompt_tokens", "completion_tokens", "cost_usd")
        shares = {n: (held.get(n, 0.0) - self.lost.get(n, 0.0)) / calls for n in names}
        return {n: amount for n, amount in shares.items() if amount > 0}

    def _lose(self, perhaps: Mapping[str, float]) -> None:
        for name, amount in perhaps.items():
            self.lost[name] = self.lost.get(name, 0.0) + amount

    def take_failure(self, role: str, failure: ProviderError) -> None:
        """Book a call that failed for good by what it can have cost; where nobody can tell, that is
        all that was held for it."""
        end = book_failure(failure, duration_s=0.0, price=None)
        if end.kind != "unsettled":
            if end.usage.calls:
                self.visit.spend(role, end.usage)
            return
        held = self.reservation.amounts if self.reservation is not None else {}
        used = sum(self.visit.usage.values(), Usage())
        self.is_at_worst = True

        def left(name: str, gone: float) -> float:
            return max(0.0, held.get(name, 0.0) - gone - self.lost.get(name, 0.0))

        self.visit.spend(
            role,
            Usage(
                uncached_tokens=int(left("prompt_tokens", used.prompt_tokens)),
                text_tokens=int(left("completion_tokens", used.completion_tokens)),
                calls=int(left("calls", used.calls + self.extra_calls)),
                cost_usd=left("cost_usd", used.cost_usd or 0.0),
                is_estimated=True,
            ),
        )


def _may_be_billed(failure: ProviderError) -> bool:
    """True where nobody can tell what a failed call cost."""
    return book_failure(failure, duration_s=0.0, price=None).kind == "unsettled"


@dataclass(slots=True)
class Counts:
    """What a search has counted beside its ledger."""

    tool_calls: int = 0
    replayed_steps: int = 0
    unscored_visits: int = 0
    cut_proposals: int = 0
    failures_in_a_row: int = 0
    best_key: tuple[Any, ...] = ()
    best_at: int = 0
    usage: dict[str, Usage] = field(default_factory=dict)


class Worker:
    """Does the work of visits, one after another or many at once.

    Args:
        fold: the tree and the algorithm.
        job: task, parts and settings.
        counts: where repeated steps and cut proposals are counted.
    """

    def __init__(self, fold: SearchState, job: SearchJob, counts: Counts) -> None:
        self.fold, self.job = fold, job
        self.task, self.settings = job.task, job.settings
        self.expander, self.environment, self.scorer = job.expander, job.environment, job.scorer
        self._counts = counts

    def context_of(self, ticket: Ticket, node: Node) -> SearchContext:
        return SearchContext(
            self.task,
            self.fold.tree,
            self.job.context,
            ticket.work._replace(k=ticket.k),
            0,
            ticket.first_sample,
        )

    def _seed(self, ticket: Ticket, node: Node) -> int:
        """Fixed by the search's seed, the path and the draw; not by the order of arrival."""
        path = [n.action_key for n in self.fold.tree.path(node)[1:]]
        parts = (self.settings.seed, self.task.task_id, path, ticket.first_sample, ticket.work.arm)
        return derive_seed(*parts)

    async def visit(self, ticket: Ticket, node: Node) -> None:
        visit = ticket.visit
        if not node.is_executed and visit.outcome is None:
            visit.outcome = await self._execute(ticket, node.parent, node.action)
            self.write(ticket, "executed", outcome=visit.outcome.to_dict())
        outcome = visit.outcome
        if outcome is not None and outcome.error:
            return
        if node.is_terminal or (outcome is not None and outcome.is_terminal):
            await self._verify(ticket, node)
            return
        if not self.fold.wants_children(node) or visit.error:
            return
        ctx = self.context_of(ticket, node)
        if visit.proposals is None:
            await self._propose(ticket, ctx, node)
        children = self.fold.provisional(node, visit.proposals or ())
        if self.settings.execution == "eager":
            await self._execute_children(ticket, node, children)
        if visit.scores is None and children and "score" not in visit.gave_up:
            await self._score(ticket, ctx, node, children)

    async def _propose(self, ticket: Ticket, ctx: SearchContext, node: Node) -> None:
        visit = ticket.visit
        ctx.seed = self._seed(ticket, node)
        try:
            with boundary(PolicyError, f"expander {type(self.expander).__name__}"):
                proposals = await self.expander.propose(ctx, node, ticket.k)
        finally:
            self._take_usage(ticket, ctx)
        visit.proposals = self._cut(proposals, ticket.k)
        self.write(
            ticket,
            "proposed",
            proposals=[p.to_dict() for p in visit.proposals],
            usage=usage_rows(visit),
        )

    def _cut(self, proposals: Sequence[Proposal], k: int) -> list[Proposal]:
        """Keep to the k children that were reserved; an expander may not offer more."""
        if len(proposals) <= k:
            return list(proposals)
        ordered = sorted(proposals, key=lambda p: -p.count)
        self._counts.cut_proposals += len(proposals) - k
        return ordered[:k]

    async def _score(
        self, ticket: Ticket, ctx: SearchContext, node: Node, children: Sequence[Node]
    ) -> None:
        visit = ticket.visit
        ctx.spent.clear()
        ctx.seed = ctx.seed or self._seed(ticket, node)
        where = f"scorer {type(self.scorer).__name__}"
        try:
            with boundary(PolicyError, where):
                scores = list(await self.scorer.score(ctx, node, children))
        except (BudgetError, ConfigError, StoreError):
            raise
        except ProviderError as exc:
            if exc.is_fatal:
                raise
            ticket.take_failure("score", exc)
            self._unscored(ticket, ctx, exc)
            return
        except TfgrpoError as exc:  # the children are paid for: they stay, unscored
            self._unscored(ticket, ctx, exc)
            return
        finally:
            self._take_usage(ticket, ctx)
        if len(scores) != len(children):
            raise ConfigError(
                f"{where} gave {len(scores)} scores for {len(children)} children: one a child"
            )
        visit.scores = scores
        self.write(ticket, "scored", scores=[s.to_dict() for s in scores], usage=usage_rows(visit))

    def _unscored(self, ticket: Ticket, ctx: SearchContext, exc: TfgrpoError) -> None:
        self._take_usage(ticket, ctx)
        ticket.visit.gave_up |= {"score"}
        self.write(ticket, "unscored", error=str(exc), usage=usage_rows(ticket.visit))

    def _take_usage(self, ticket: Ticket, ctx: SearchContext) -> None:
        for role, usage in ctx.spent.items():
            ticket.visit.spend(role, usage)
        ctx.spent.clear()
        for failure in ctx.failed:
            ticket.take_lost(failure)
        ctx.failed.clear()

    async def _execute_children(self, ticket: Ticket, node: Node, children: Sequence[Node]) -> None:
        visit = ticket.visit
        if visit.outcomes is None:
            visit.outcomes = [None] * len(children)

        for i, child in enumerate(children):
            if visit.outcomes[i] is None:
                outcome = await self._execute(ticket, node.id, child.action)
                visit.outcomes[i] = outcome
                self.write(ticket, "child", index=i, outcome=outcome.to_dict())

    async def _verify(self, ticket: Ticket, node: Node) -> None:
        visit = ticket.visit
        if self.job.verifier is None or self.settings.verify != "during":
            return
        if visit.reward is not None or "verify" in visit.gave_up:
            return
        tree = self.fold.tree
        attempt = rollout_of(self.task, tree, node, outcome=visit.outcome)
        judged = await judge(
            attempt, self.task, self.job.verifier, timeout_s=self.settings.verifier_timeout_s
        )
        if judged.reward is None:
            visit.gave_up |= {"verify"}
            self.write(ticket, "unverified", error=judged.error)
            return
        visit.reward = judged.reward
        self.write(ticket, "verified", reward=judged.reward)

    async def _execute(self, ticket: Ticket, parent_id: int, action: Any) -> StepResult:
        if self.environment.effects(action) == "irreversible" and not self._may_run_anything():
            return StepResult(
                observation=NOT_RUN,
                is_terminal=True,
                notes=("waits for commit",),
                tool_calls=0,
            )
        state = await self._state(self.fold.tree[parent_id])
        if state is None:
            return StepResult(
                error="the state before this action cannot be made again", tool_calls=0
            )
        outcome = await self._apply(state, action)
        if self.fold.goes_round(self.fold.tree[parent_id], action, outcome):
            outcome = replace(outcome, error=NO_PROGRESS)
        ticket.visit.tool_calls += outcome.tool_calls
        if outcome.usage.calls or outcome.usage.total_tokens:
            ticket.visit.spend("tool", outcome.usage)
        return outcome

    def _may_run_anything(self) -> bool:
        return bool(self.environment.is_simulator)

    async def _apply(self, state: Any, action: Any) -> StepResult:
        try:
            with boundary(PolicyError, f"environment, action {action_name(action)!r}"):
                return await self.environment.apply(state, action)
        except PolicyError as exc:
            return StepResult(error=str(exc))

    async def _state(self, node: Node) -> Any:
        """Return a node's state, made again by running its path where a restart lost it."""
        missing: list[Node] = []
        at = node
        while at.state is None and at.parent >= 0:
            missing.append(at)
            at = self.fold.tree[at.parent]
        for below in reversed(missing):
            outcome = await self._apply(self.fold.tree[below.parent].state, below.action)
            self._counts.replayed_steps += 1
            if outcome.error or outcome.state is None:
                return None
            below.state = outcome.state
        return node.state

    def log_selected(self, ticket: Ticket) -> None:
        work = ticket.work
        extra = {n: getattr(work, n) for n in ("k", "arm", "prefix") if getattr(work, n)}
        self.write(ticket, "selected", node=work.node, **extra)

    def write(self, ticket: Ticket, event: str, **fields: Any) -> None:
        if self.job.log is not None:
            self.job.log.append({"event": event, "ticket": ticket.number, **fields})


def usage_rows(visit: VisitResult) -> dict[str, Any]:
    return {role: usage.to_dict() for role, usage in visit.usage.items()}
