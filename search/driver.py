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

from tfgrpo.errors import BudgetError, ConfigError, ProviderError, StoreError, TfgrpoError
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope, extra_calls
from tfgrpo.search.algorithms.protocol import VisitRequest
from tfgrpo.search.reservations import Reservations
from tfgrpo.search.resume import Pending, begin_or_replay
from tfgrpo.search.settings import SearchJob, SearchResult
from tfgrpo.search.state import SearchState, VisitResult
from tfgrpo.search.worker import Counts, Ticket, Worker, usage_rows
from tfgrpo.store.budget import Budget, Ledger

__all__ = ["Driver"]


class Driver:
    """One search of one task. Use it once; `run` returns the result.

    Args:
        fold: the tree and the algorithm.
        job: task, parts and settings.
        ledger: limits of this search. Where the LM keeps a ledger of its own (a journalled one
            does), don't make that ledger this one's parent, or calls count twice.
    """

    def __init__(self, fold: SearchState, job: SearchJob, ledger: Ledger | None = None) -> None:
        self.fold, self.job = fold, job
        self.settings = job.settings
        self.ledger = ledger if ledger is not None else Ledger(Budget())
        self._check_merge()
        self._counts = Counts()
        self._worker = Worker(fold, job, self._counts)
        self._booking = Reservations(self.ledger, self._worker)
        settings = job.settings
        deterministic = settings.mode == "deterministic"
        advised = settings.lookahead or fold.algorithm.lookahead
        self._width = max(1, advised) if deterministic else settings.concurrency
        self._slots = asyncio.Semaphore(settings.concurrency)
        self._open: dict[int, Ticket] = {}
        self._held: Ticket | None = None
        self._arrived = asyncio.Event()
        self._next_number = 0
        self._asked: dict[int, int] = {}
        self._stop = ""
        self._error: TfgrpoError | None = None

    def _check_merge(self) -> None:
        if self.settings.merge == "sound" and not self.job.scorer.is_additive:
            raise ConfigError(
                f"merge='sound' with {type(self.job.scorer).__name__}: its costs depend on the "
                "whole path, so equal states may not be merged. Use merge='off', or merge='any' to "
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
            with call_scope(CallScope("search", self.job.task.task_id)):
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
            root.state = await self.job.environment.start()
            root.state_key = self.job.environment.key(root.state)
            if self.fold.merge != "off" and root.state_key is not None:
                self.fold.tree.by_state.setdefault(root.state_key, 0)
        created = {
            "task_id": self.job.task.task_id,
            "algorithm": type(self.fold.algorithm).__name__,
            "settings": self.settings.to_dict(),
        }
        for pending in begin_or_replay(self.job.log, created, self.fold, self._replayed):
            ticket = self._ticket(pending.number, pending.work)
            ticket.visit = pending.visit
            try:
                ticket.reservation = self._booking.reserve(ticket)
            except BudgetError as exc:
                self._stop = self._stop or f"budget: {exc.resource}"
                self._put_back(ticket)
            else:
                self._start(ticket)

    def _replayed(self, pending: Pending) -> None:
        """Take a visit of an earlier session that is committed again from the log."""
        ticket = self._ticket(pending.number, pending.work)
        ticket.visit = pending.visit
        self.ledger.charge(**self._booking.actual(ticket))
        self._count(ticket)

    def _result(self) -> SearchResult:
        fold, counts = self.fold, self._counts
        tree = fold.tree
        for node in tree:  # finished at birth, but not taken up before the search ended
            if node.is_terminal and node.status in ("open", "in_flight"):
                node.status = "terminal"
        reason = self._stop or fold.algorithm.finished(tree) or "exhausted"
        if self.job.log is not None:
            self.job.log.append({"event": "stop", "reason": reason})
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
            fold, self.job.task, reason, best, counts.usage, counters, spent, self._error
        )

    def _watch_cancel(self) -> asyncio.Task[None] | None:
        if self.job.cancel is None:
            return None

        async def wait(event: asyncio.Event) -> None:
            await event.wait()
            self._halt("cancelled")

        return asyncio.create_task(wait(self.job.cancel))

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
            self._booking.settle(ticket)
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
                    self._booking.settle(ticket)
                    raise failure
            self._commit(ticket)

    def _ready(self) -> Ticket | None:
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
                ticket.reservation = self._booking.reserve(ticket)
            except BudgetError as exc:
                self._held = ticket
                if self._open:  # running visits may settle below what they hold
                    return
                self._stop = f"budget: {exc.resource}"
                self._put_back(ticket)
                if self.job.log is not None:
                    self.job.log.append({"event": "budget", "resource": exc.resource})
                return
            self._next_number += 1
            self._worker.log_selected(ticket)
            self._start(ticket)

    def _select(self) -> Ticket | None:
        work = self.fold.select()
        return None if work is None else self._ticket(self._next_number, work)

    def _ticket(self, number: int, work: VisitRequest) -> Ticket:
        k = work.k or self.settings.samples
        first_sample = self._asked.get(work.node, 0)
        self._asked[work.node] = first_sample + k
        self._next_number = max(self._next_number, number)
        return Ticket(number, work, first_sample, k, VisitResult())

    def _put_back(self, ticket: Ticket) -> None:
        node = self.fold.tree[ticket.work.node]
        if node.status == "in_flight":
            node.status = "open"

    def _start(self, ticket: Ticket) -> None:
        self._open[ticket.number] = ticket
        self._next_number = max(self._next_number, ticket.number + 1)
        ticket.task = asyncio.create_task(self._run_visit(ticket))
        ticket.task.add_done_callback(lambda _: self._arrived.set())

    # --- commit -----------------------------------------------------------------------------

    def _commit(self, ticket: Ticket) -> None:
        visit = ticket.visit
        self._booking.settle(ticket)
        self._count(ticket)
        if not ticket.is_whole and visit.proposals is None and not visit.reward:
            self._put_back(ticket)  # stopped before anything came; the log keeps what did
            return
        if ticket.is_whole and self.job.log is not None:
            self.job.log.append({"event": "commit", "ticket": ticket.number})
        self.fold.commit(ticket.work, visit)
        self._watch_failures(visit)
        self._watch_patience()
        if self.job.on_commit is not None:
            self.job.on_commit(self.fold)

    def _count(self, ticket: Ticket) -> None:
        counts, visit = self._counts, ticket.visit
        counts.tool_calls += visit.tool_calls
        for role, usage in visit.usage.items():
            counts.usage[role] = counts.usage.get(role, Usage()) + usage
        if visit.proposals and visit.scores is None:
            counts.unscored_visits += 1

    def _watch_failures(self, visit: VisitResult) -> None:
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

    async def _run_visit(self, ticket: Ticket) -> None:
        async with self._slots:
            if self._stop.startswith("provider"):
                return  # not begun: nothing is paid for an answer that will not come
            node = self.fold.tree[ticket.work.node]
            try:
                with extra_calls(ticket.allow_call):
                    await self._worker.visit(ticket, node)
            except BudgetError as exc:
                ticket.visit.error = f"budget: {exc}"
                self._stop = self._stop or f"budget: {exc.resource}"
            except ProviderError as exc:
                ticket.visit.error = f"provider {exc.kind}: {exc}"
                ticket.take_failure("propose", exc)
                if exc.is_fatal:
                    self._error = exc
                    self._stop = self._stop or f"provider: {exc.kind}"
            except (ConfigError, StoreError):
                raise
            except TfgrpoError as exc:
                ticket.visit.error = str(exc)
            if ticket.visit.error:
                usage = usage_rows(ticket.visit)
                self._worker.write(ticket, "failed", error=ticket.visit.error, usage=usage)
            ticket.is_whole = True
