"""The driver: the only asynchronous part of a search.

It asks the fold for visits, does their paid work on a bounded number of slots, commits the results
and keeps to the budget. Rules:

* Every paid result lands in the tree; results are logged when they arrive.
* `deterministic`: visits are selected and committed in ticket order, with at most `lookahead` open
  at once, so the tree is the same at any concurrency. `fast`: committed when they arrive.
* Budgets are reserved before a visit at its worst case and settled at its commit. What does not
  fit waits for running visits to settle; if it still does not fit, the search stops with the best
  so far and the reason.
* Lazy: a child is scored from its proposal, its tool runs when the child is visited. Eager: the
  children's tools run at once.
* A tool error, an invalid call, a time-out or a refusal is the outcome of a visit. Only broken
  settings and stores raise, and then only after all running visits have been stopped.

Does not know algorithms, prompts or what tools do. Source: own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from tfgrpo.canonical import derive_seed
from tfgrpo.context import EMPTY_CONTEXT, Context
from tfgrpo.errors import (
    BudgetError,
    ConfigError,
    PolicyError,
    ProviderError,
    StoreError,
    TfgrpoError,
    VerifierError,
    boundary,
)
from tfgrpo.protocols import Verifier
from tfgrpo.rollout import Task, Usage
from tfgrpo.scope import CallScope, call_scope
from tfgrpo.search.algorithm import Work
from tfgrpo.search.environment import Environment, Outcome
from tfgrpo.search.expander import Expander, estimate_of
from tfgrpo.search.fold import Fold, Merge, Visit
from tfgrpo.search.log import EventLog
from tfgrpo.search.node import Node, Proposal, action_name
from tfgrpo.search.paths import rollout_of
from tfgrpo.search.replay import Pending, begin_or_replay
from tfgrpo.search.scorer import Scorer, SearchContext
from tfgrpo.store.budget import Budget, Ledger, Reservation

__all__ = ["Driver", "SearchResult", "SearchSettings"]


@dataclass(frozen=True, slots=True)
class SearchSettings:
    """How a search is driven."""

    samples: int = 8
    """Samples a visit draws where the algorithm does not say; at most as many children."""
    mode: Literal["deterministic", "fast"] = "deterministic"
    concurrency: int = 8
    """Visits whose work may run at the same time."""
    lookahead: int = 0
    """Visits open at once in deterministic mode; 0 takes the algorithm's own."""
    execution: Literal["lazy", "eager"] = "lazy"
    merge: Merge = "off"
    verify: Literal["after", "during"] = "after"
    """Whether a verifier may steer the search. `during` uses the answer key while searching: right
    for making training data, never for a benchmark."""
    patience: int | None = None
    """Stop after this many expansions without a better best node."""
    max_failures: int = 8
    """Stop after this many visits in a row whose model call failed."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("samples", "concurrency", "max_failures"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)!r}: give at least 1")
        if self.merge != "off" and self.execution != "eager":
            raise ConfigError(
                f"merge={self.merge!r} needs execution='eager': equal states are known only once "
                "the children's actions have run"
            )

    def to_dict(self) -> dict[str, Any]:
        """Return what fixes the tree; concurrency does not in deterministic mode."""
        names = ("samples", "mode", "lookahead", "execution", "merge", "verify", "patience")
        row = {name: getattr(self, name) for name in names}
        return row | {"seed": self.seed}


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What a search found, whether it ended or was stopped."""

    fold: Fold
    task: Task
    stop_reason: str
    """`goal`, `exhausted`, `converged`, `patience`, `cancelled`, `budget: RESOURCE`,
    `provider: KIND`, or the algorithm's own."""
    best: Node
    usage_by_role: dict[str, Usage]
    counters: dict[str, int]
    """visits, expansions, nodes, tool_calls, replayed_steps, merged_siblings, merged_states,
    unscored_visits, cut_proposals."""
    spent: dict[str, float]
    error: TfgrpoError | None = None
    """What stopped it, where that was a failure."""

    @property
    def plan(self) -> list[Any]:
        """Actions of the best path."""
        return self.fold.tree.plan(self.best)

    @property
    def is_solved(self) -> bool:
        """True when the best node is a goal."""
        return self.best.is_goal and self.best.status == "terminal"

    @property
    def frontier(self) -> list[Node]:
        """Nodes generated and not yet worked on."""
        return self.fold.tree.with_status("open", "in_flight")

    @property
    def usage(self) -> Usage:
        """Everything together."""
        return sum(self.usage_by_role.values(), Usage())


@dataclass(slots=True)
class _Ticket:
    number: int
    work: Work
    first_sample: int
    k: int
    visit: Visit
    reservation: Reservation | None = None
    task: asyncio.Task[None] | None = None
    is_whole: bool = False
    """False while running, and for a visit that was stopped."""


@dataclass(slots=True)
class _Counts:
    tool_calls: int = 0
    replayed_steps: int = 0
    unscored_visits: int = 0
    cut_proposals: int = 0
    failures_in_a_row: int = 0
    best_key: tuple[Any, ...] = ()
    best_at: int = 0
    usage: dict[str, Usage] = field(default_factory=dict)


class Driver:
    """One search of one task. Use it once; `run` returns the result.

    Args:
        fold: the tree and the algorithm.
        ledger: limits of this search. Where the LM keeps a ledger of its own (a journalled one
            does), don't make that ledger this one's parent, or calls count twice.
        log: where events go; a log with events is continued.
        verifier: judges finished paths during the search where the settings say so.
        cancel: set it to stop with the best so far.
        on_commit: called after each commit, for live views; must be quick.
    """

    def __init__(
        self,
        fold: Fold,
        *,
        task: Task,
        expander: Expander,
        environment: Environment,
        scorer: Scorer,
        settings: SearchSettings = SearchSettings(),
        context: Context = EMPTY_CONTEXT,
        ledger: Ledger | None = None,
        log: EventLog | None = None,
        verifier: Verifier | None = None,
        cancel: asyncio.Event | None = None,
        on_commit: Callable[[Fold], None] | None = None,
    ) -> None:
        self.fold, self.task, self.context = fold, task, context
        self.expander, self.environment, self.scorer = expander, environment, scorer
        self.settings, self.verifier = settings, verifier
        self.ledger = ledger if ledger is not None else Ledger(Budget())
        self.log = log
        self._cancel, self._on_commit = cancel, on_commit
        self._check_merge()
        deterministic = settings.mode == "deterministic"
        advised = settings.lookahead or fold.algorithm.lookahead
        self._width = max(1, advised) if deterministic else settings.concurrency
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._open: dict[int, _Ticket] = {}
        self._held: _Ticket | None = None
        self._arrived = asyncio.Event()
        self._next_number = 0
        self._asked: dict[int, int] = {}
        self._stop = ""
        self._error: TfgrpoError | None = None
        self._counts = _Counts()

    def _check_merge(self) -> None:
        if self.settings.merge == "sound" and not self.scorer.is_additive:
            raise ConfigError(
                f"merge='sound' with {type(self.scorer).__name__}: its costs depend on the whole "
                "path, so equal states may not be merged. Use merge='off', or merge='any' to "
                "accept the approximation"
            )
        self.fold.merge = self.settings.merge

    async def run(self) -> SearchResult:
        """Search until a goal, a limit or the end of the tree.

        Raises:
            ConfigError, StoreError: the settings or the log cannot be used; every visit has been
                stopped and every reservation returned before it leaves.
        """
        await self._begin()
        watcher = self._watch_cancel()
        try:
            with call_scope(CallScope("search", self.task.task_id)):
                await self._loop()
        finally:
            if watcher is not None:
                watcher.cancel()
            await self._stop_all()
        return self._result()

    # --- start and end ----------------------------------------------------------------------

    async def _begin(self) -> None:
        root = self.fold.tree.root
        if root.state is None:
            root.state = await self.environment.start()
            root.state_key = self.environment.key(root.state)
            if self.fold.merge != "off" and root.state_key is not None:
                self.fold.tree.by_state.setdefault(root.state_key, 0)
        created = {
            "task_id": self.task.task_id,
            "algorithm": type(self.fold.algorithm).__name__,
            "settings": self.settings.to_dict(),
        }
        for pending in begin_or_replay(self.log, created, self.fold, self._replayed):
            ticket = self._ticket(pending.number, pending.work)
            ticket.visit = pending.visit
            try:
                ticket.reservation = self._reserve(ticket)
            except BudgetError as exc:
                self._stop = self._stop or f"budget: {exc.resource}"
                self._put_back(ticket)
            else:
                self._start(ticket)

    def _replayed(self, pending: Pending) -> None:
        """Take a visit of an earlier session that is committed again from the log."""
        ticket = self._ticket(pending.number, pending.work)
        ticket.visit = pending.visit
        self.ledger.charge(**self._actual(ticket))
        self._count(ticket)

    def _result(self) -> SearchResult:
        fold, counts = self.fold, self._counts
        tree = fold.tree
        for node in tree:  # finished at birth, but not taken up before the search ended
            if node.is_terminal and node.status in ("open", "in_flight"):
                node.status = "terminal"
        reason = self._stop or fold.algorithm.finished(tree) or "exhausted"
        if self.log is not None:
            self.log.append({"event": "stop", "reason": reason})
        counters = {
            "visits": fold.commits,
            "expansions": fold.expansions,
            "nodes": len(tree),
            "tool_calls": counts.tool_calls,
            "replayed_steps": counts.replayed_steps,
            "merged_siblings": tree.merged_siblings,
            "merged_states": tree.merged_states,
            "unscored_visits": counts.unscored_visits,
            "cut_proposals": counts.cut_proposals,
        }
        best = tree[fold.algorithm.best(tree)]
        spent = self.ledger.spent
        return SearchResult(
            fold, self.task, reason, best, counts.usage, counters, spent, self._error
        )

    def _watch_cancel(self) -> asyncio.Task[None] | None:
        if self._cancel is None:
            return None

        async def wait(event: asyncio.Event) -> None:
            await event.wait()
            self._halt("cancelled")

        return asyncio.create_task(wait(self._cancel))

    def _halt(self, reason: str) -> None:
        """Stop selecting and stop what is running; what has been paid for is kept."""
        self._stop = self._stop or reason
        for ticket in self._open.values():
            if ticket.task is not None:
                ticket.task.cancel()
        self._arrived.set()

    async def _stop_all(self) -> None:
        tasks = [t.task for t in self._open.values() if t.task is not None]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.gather(*tasks, return_exceptions=True)
        for ticket in self._open.values():
            self._settle(ticket)
            self._put_back(ticket)
        self._open.clear()
        if self._held is not None:
            self._put_back(self._held)

    # --- the loop ---------------------------------------------------------------------------

    async def _loop(self) -> None:
        while True:
            self._launch()
            if not self._open:
                return
            ticket = self._ready()
            if ticket is None:
                await self._wait()
                continue
            del self._open[ticket.number]
            if ticket.task is not None and not ticket.task.cancelled():
                failure = ticket.task.exception()
                if failure is not None:
                    self._settle(ticket)
                    raise failure
            self._commit(ticket)

    def _ready(self) -> _Ticket | None:
        """Return the next visit to commit: the lowest ticket, or in fast mode any that is done."""
        if self.settings.mode == "deterministic":
            first = next(iter(self._open.values()))
            return first if first.task is not None and first.task.done() else None
        for ticket in self._open.values():
            if ticket.task is not None and ticket.task.done():
                return ticket
        return None

    async def _wait(self) -> None:
        self._arrived.clear()
        left = self.ledger.remaining("seconds")
        try:
            async with asyncio.timeout(None if left == float("inf") else left):
                await self._arrived.wait()
        except TimeoutError:
            self._halt("budget: seconds")
            self._arrived.clear()
            await asyncio.sleep(0)

    def _launch(self) -> None:
        while len(self._open) < self._width:
            if self._stop or self.fold.algorithm.finished(self.fold.tree):
                return
            ticket = self._held or self._select()
            self._held = None
            if ticket is None:
                return
            try:
                ticket.reservation = self._reserve(ticket)
            except BudgetError as exc:
                self._held = ticket
                if self._open:  # running visits may settle below what they hold
                    return
                self._stop = f"budget: {exc.resource}"
                self._put_back(ticket)
                if self.log is not None:
                    self.log.append({"event": "budget", "resource": exc.resource})
                return
            self._next_number += 1
            self._log_selected(ticket)
            self._start(ticket)

    def _select(self) -> _Ticket | None:
        work = self.fold.select()
        return None if work is None else self._ticket(self._next_number, work)

    def _ticket(self, number: int, work: Work) -> _Ticket:
        k = work.k or self.settings.samples
        first_sample = self._asked.get(work.node, 0)
        self._asked[work.node] = first_sample + k
        self._next_number = max(self._next_number, number)
        return _Ticket(number, work, first_sample, k, Visit())

    def _put_back(self, ticket: _Ticket) -> None:
        node = self.fold.tree[ticket.work.node]
        if node.status == "in_flight":
            node.status = "open"

    def _start(self, ticket: _Ticket) -> None:
        self._open[ticket.number] = ticket
        self._next_number = max(self._next_number, ticket.number + 1)
        ticket.task = asyncio.create_task(self._run_visit(ticket))
        ticket.task.add_done_callback(lambda _: self._arrived.set())

    # --- money ------------------------------------------------------------------------------

    def _reserve(self, ticket: _Ticket) -> Reservation:
        """Reserve a visit's worst case; fewer samples where only fewer children fit."""
        node = self.fold.tree[ticket.work.node]
        amounts: dict[str, float] = {}
        visit = ticket.visit
        if not node.is_executed:
            amounts["tool_calls"] = 1.0
        if self.fold.wants_children(node):
            room = self.ledger.remaining("nodes")
            if 1 <= room < ticket.k and visit.proposals is None:
                ticket.k = int(room)
            ctx = self._context(ticket, node)
            amounts["expansions"] = 1.0
            amounts["nodes"] = float(ticket.k)
            if self.settings.execution == "eager":
                amounts["tool_calls"] = amounts.get("tool_calls", 0.0) + ticket.k
            for part in (self.expander, self.scorer):
                if part is self.scorer and not hasattr(part, "estimate"):
                    continue
                for name, amount in estimate_of(part, ctx, node, ticket.k).items():  # type: ignore[arg-type]  # both have the same optional method
                    amounts[name] = amounts.get(name, 0.0) + amount
        return self.ledger.reserve(**amounts)

    def _actual(self, ticket: _Ticket) -> dict[str, float]:
        """Return what a visit used, by resource."""
        visit = ticket.visit
        usage = sum(visit.usage.values(), Usage())
        children = 0
        if visit.proposals is not None:
            children = len(self.fold.provisional(self.fold.tree[ticket.work.node], visit.proposals))
        actual = {
            "calls": float(usage.calls),
            "prompt_tokens": float(usage.prompt_tokens),
            "completion_tokens": float(usage.completion_tokens),
            "tool_calls": float(visit.tool_calls),
            "expansions": 1.0 if visit.proposals is not None or visit.error else 0.0,
            "nodes": float(children),
            "depth": float(self.fold.tree[ticket.work.node].depth + (1 if children else 0)),
        }
        if usage.cost_usd is not None:
            actual["cost_usd"] = usage.cost_usd
        return actual

    def _settle(self, ticket: _Ticket) -> None:
        """Spend what arrived and give the rest back, also for a visit that was stopped."""
        if ticket.reservation is not None and ticket.reservation.is_open:
            held = ticket.reservation.amounts
            ticket.reservation.settle(**dict.fromkeys(held, 0.0) | self._actual(ticket))

    def _count(self, ticket: _Ticket) -> None:
        counts, visit = self._counts, ticket.visit
        counts.tool_calls += visit.tool_calls
        for role, usage in visit.usage.items():
            counts.usage[role] = counts.usage.get(role, Usage()) + usage
        if visit.proposals and visit.scores is None:
            counts.unscored_visits += 1

    # --- commit -----------------------------------------------------------------------------

    def _commit(self, ticket: _Ticket) -> None:
        visit = ticket.visit
        self._settle(ticket)
        self._count(ticket)
        if not ticket.is_whole and visit.proposals is None and not visit.reward:
            self._put_back(ticket)  # stopped before anything came; the log keeps what did
            return
        if ticket.is_whole and self.log is not None:
            self.log.append({"event": "commit", "ticket": ticket.number})
        self.fold.commit(ticket.work, visit)
        self._watch_failures(visit)
        self._watch_patience()
        if self._on_commit is not None:
            self._on_commit(self.fold)

    def _watch_failures(self, visit: Visit) -> None:
        counts = self._counts
        if visit.error.startswith("provider"):
            counts.failures_in_a_row += 1
            if counts.failures_in_a_row >= self.settings.max_failures:
                self._stop = self._stop or "provider: failing"
        elif visit.proposals is not None:
            counts.failures_in_a_row = 0

    def _watch_patience(self) -> None:
        if self.settings.patience is None:
            return
        fold, counts = self.fold, self._counts
        best = fold.tree[fold.algorithm.best(fold.tree)]
        key = (best.is_goal, best.reward or 0.0, best.value or 0.0, -best.g - best.h)
        if not counts.best_key or key > counts.best_key:
            counts.best_key, counts.best_at = key, fold.expansions
        elif fold.expansions - counts.best_at >= self.settings.patience:
            self._stop = self._stop or "patience"

    # --- one visit --------------------------------------------------------------------------

    def _context(self, ticket: _Ticket, node: Node) -> SearchContext:
        return SearchContext(
            self.task,
            self.fold.tree,
            self.context,
            ticket.work._replace(k=ticket.k),
            0,
            ticket.first_sample,
        )

    def _seed(self, ticket: _Ticket, node: Node) -> int:
        """Fixed by the search's seed, the path and the draw; not by the order of arrival."""
        path = [n.action_key for n in self.fold.tree.path(node)[1:]]
        parts = (self.settings.seed, self.task.task_id, path, ticket.first_sample, ticket.work.arm)
        return derive_seed(*parts)

    async def _run_visit(self, ticket: _Ticket) -> None:
        async with self._slots:
            if self._stop.startswith("provider"):
                return  # not begun: nothing is paid for an answer that will not come
            node = self.fold.tree[ticket.work.node]
            try:
                await self._visit(ticket, node)
            except BudgetError as exc:
                ticket.visit.error = f"budget: {exc}"
                self._stop = self._stop or f"budget: {exc.resource}"
            except ProviderError as exc:
                ticket.visit.error = f"provider {exc.kind}: {exc}"
                if exc.is_fatal:
                    self._error = exc
                    self._stop = self._stop or f"provider: {exc.kind}"
            except (ConfigError, StoreError):
                raise
            except TfgrpoError as exc:
                ticket.visit.error = str(exc)
            if ticket.visit.error:
                usage = _usage_rows(ticket.visit)
                self._write(ticket, "failed", error=ticket.visit.error, usage=usage)
            ticket.is_whole = True

    async def _visit(self, ticket: _Ticket, node: Node) -> None:
        visit = ticket.visit
        if not node.is_executed and visit.outcome is None:
            visit.outcome = await self._execute(ticket, node.parent, node.action)
            self._write(ticket, "executed", outcome=visit.outcome.to_dict())
        outcome = visit.outcome
        if outcome is not None and outcome.error:
            return
        if node.is_terminal or (outcome is not None and outcome.is_terminal):
            await self._verify(ticket, node)
            return
        if not self.fold.wants_children(node) or visit.error:
            return
        ctx = self._context(ticket, node)
        if visit.proposals is None:
            await self._propose(ticket, ctx, node)
        children = self.fold.provisional(node, visit.proposals or ())
        if self.settings.execution == "eager":
            await self._execute_children(ticket, node, children)
        if visit.scores is None and children and "score" not in visit.gave_up:
            await self._score(ticket, ctx, node, children)

    async def _propose(self, ticket: _Ticket, ctx: SearchContext, node: Node) -> None:
        visit = ticket.visit
        ctx.seed = self._seed(ticket, node)
        try:
            with boundary(PolicyError, f"expander {type(self.expander).__name__}"):
                proposals = await self.expander.propose(ctx, node, ticket.k)
        finally:
            self._take_usage(visit, ctx)
        visit.proposals = self._cut(proposals, ticket.k)
        self._write(
            ticket,
            "proposed",
            proposals=[p.to_dict() for p in visit.proposals],
            usage=_usage_rows(visit),
        )

    def _cut(self, proposals: Sequence[Proposal], k: int) -> list[Proposal]:
        """Keep to the k children that were reserved; an expander may not offer more."""
        if len(proposals) <= k:
            return list(proposals)
        ordered = sorted(proposals, key=lambda p: -p.count)
        self._counts.cut_proposals += len(proposals) - k
        return ordered[:k]

    async def _score(
        self, ticket: _Ticket, ctx: SearchContext, node: Node, children: Sequence[Node]
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
            self._unscored(ticket, ctx, exc)
            return
        except TfgrpoError as exc:  # the children are paid for: they stay, unscored
            self._unscored(ticket, ctx, exc)
            return
        finally:
            self._take_usage(visit, ctx)
        if len(scores) != len(children):
            raise ConfigError(
                f"{where} gave {len(scores)} scores for {len(children)} children: one a child"
            )
        visit.scores = scores
        self._write(
            ticket, "scored", scores=[s.to_dict() for s in scores], usage=_usage_rows(visit)
        )

    def _unscored(self, ticket: _Ticket, ctx: SearchContext, exc: TfgrpoError) -> None:
        self._take_usage(ticket.visit, ctx)
        ticket.visit.gave_up |= {"score"}
        self._write(ticket, "unscored", error=str(exc), usage=_usage_rows(ticket.visit))

    def _take_usage(self, visit: Visit, ctx: SearchContext) -> None:
        for role, usage in ctx.spent.items():
            visit.spend(role, usage)
        ctx.spent.clear()

    async def _execute_children(
        self, ticket: _Ticket, node: Node, children: Sequence[Node]
    ) -> None:
        visit = ticket.visit
        if visit.outcomes is None:
            visit.outcomes = [None] * len(children)

        for i, child in enumerate(children):
            if visit.outcomes[i] is None:
                outcome = await self._execute(ticket, node.id, child.action)
                visit.outcomes[i] = outcome
                self._write(ticket, "child", index=i, outcome=outcome.to_dict())

    async def _verify(self, ticket: _Ticket, node: Node) -> None:
        visit = ticket.visit
        if self.verifier is None or self.settings.verify != "during":
            return
        if visit.reward is not None or "verify" in visit.gave_up:
            return
        tree = self.fold.tree
        rollout = rollout_of(self.task, tree, node, outcome=visit.outcome)
        try:
            with boundary(VerifierError, f"verifier {self.verifier.verifier_id}"):
                score = await self.verifier.score(rollout, self.task)
        except (ConfigError, StoreError, BudgetError):
            raise
        except TfgrpoError as exc:
            visit.gave_up |= {"verify"}
            self._write(ticket, "unverified", error=str(exc))
            return
        visit.reward = score.reward
        self._write(ticket, "verified", reward=score.reward)

    # --- tools ------------------------------------------------------------------------------

    async def _execute(self, ticket: _Ticket, parent_id: int, action: Any) -> Outcome:
        if self.environment.effects(action) == "irreversible" and not self._may_run_anything():
            return Outcome(
                observation="(not run: irreversible; it runs when the plan is carried out)",
                is_terminal=True,
                notes=("waits for commit",),
                tool_calls=0,
            )
        state = await self._state(self.fold.tree[parent_id])
        if state is None:
            return Outcome(error="the state before this action cannot be made again", tool_calls=0)
        outcome = await self._apply(state, action)
        ticket.visit.tool_calls += outcome.tool_calls
        if outcome.usage.calls or outcome.usage.total_tokens:
            ticket.visit.spend("tool", outcome.usage)
        return outcome

    def _may_run_anything(self) -> bool:
        return bool(self.environment.is_simulator)

    async def _apply(self, state: Any, action: Any) -> Outcome:
        try:
            with boundary(PolicyError, f"environment, action {action_name(action)!r}"):
                return await self.environment.apply(state, action)
        except PolicyError as exc:
            return Outcome(error=str(exc))

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

    # --- log --------------------------------------------------------------------------------

    def _log_selected(self, ticket: _Ticket) -> None:
        work = ticket.work
        extra = {n: getattr(work, n) for n in ("k", "arm", "prefix") if getattr(work, n)}
        self._write(ticket, "selected", node=work.node, **extra)

    def _write(self, ticket: _Ticket, event: str, **fields: Any) -> None:
        if self.log is not None:
            self.log.append({"event": event, "ticket": ticket.number, **fields})


def _usage_rows(visit: Visit) -> dict[str, Any]:
    return {role: usage.to_dict() for role, usage in visit.usage.items()}
