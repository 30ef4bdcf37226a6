"""Next actions, judgements and imagined plans from a language model.

The prompt of a child is the prompt of its parent and one more step at the end, byte for byte, so
that engines with a prefix cache reuse it; what changes from visit to visit (the list of tried
siblings) comes last. All samples of a visit are drawn in one call.

Does not know algorithms or environments. Source: one batch of k samples an expansion and the
imagined remainder as in ToolChain*; showing the siblings as in DFSDT.
"""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Coroutine, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple, TypeVar

from tfgrpo.context import render_messages
from tfgrpo.errors import BudgetError, ProviderError
from tfgrpo.messages import Message
from tfgrpo.policies.tool_calls import parse_action, parse_arguments
from tfgrpo.prompts import render
from tfgrpo.protocols import LM, Completion, Request, Sampling, ToolSpec
from tfgrpo.rollout import Usage
from tfgrpo.runtime.call_scope import CallScope, call_scope, count_extra_call
from tfgrpo.runtime.canonical import derive_seed
from tfgrpo.runtime.texts.tool_names import wire_names
from tfgrpo.search.algorithms.tree_rollouts import first_entropy
from tfgrpo.search.node import FINISH, Node, NodeScore, Proposal, call, show_action
from tfgrpo.search.paths import path_messages
from tfgrpo.search.scorers.scorer import SearchContext
from tfgrpo.search.tree import Tree
from tfgrpo.store.booking import ASSUMED_REPLY_TOKENS, with_cost
from tfgrpo.store.prices import Price, price_of

__all__ = ["JudgeScorer", "LMExpander", "LMImagination", "draw"]

Form = Literal["native", "text"]


async def draw(
    lm: LM, request: Request, n: int, ctx: SearchContext, scope: CallScope, *, role: str
) -> list[Completion]:
    """Return up to n completions and report what they used; what came beside a failure is kept.

    Where each draw is a call of its own, each is asked for, tried again and booked by itself: a
    failure among replies, and a call that was stopped on its way, costs what it can have cost.

    Raises:
        ProviderError: nothing came.
    """
    seeds = [derive_seed(ctx.seed, scope.sample_index + i) for i in range(n)]
    if lm.prefers_n or n == 1:
        jobs = [_ask(_Asked(lm, request, ctx, role), seeds, scope)]
    else:
        places = (replace(scope, sample_index=scope.sample_index + i) for i in range(n))
        asked = _Asked(lm, request, ctx, role)
        jobs = [_ask(asked, [seed], place) for seed, place in zip(seeds, places, strict=True)]
    results = await asyncio.gather(*jobs, return_exceptions=True)
    found: list[Completion] = []
    failures: list[BaseException] = []
    for result in results:
        if isinstance(result, BaseException):
            failures.append(result)
        else:
            found.extend(result)
    for failure in failures:
        if not isinstance(failure, (BudgetError, ProviderError)):
            raise failure
    raised = failures[:1] if not found else []
    ctx.failed.extend(f for f in failures[len(raised) :] if isinstance(f, ProviderError))
    for failure in raised:
        raise failure
    return found


class _Asked(NamedTuple):
    lm: LM
    request: Request
    ctx: SearchContext
    role: str


async def _ask(asked: _Asked, seeds: Sequence[int], scope: CallScope) -> list[Completion]:
    """Ask for a reply a seed, again for what a short answer left out; book each as it comes."""
    lm, request, ctx, role = asked
    price = price_of(lm)
    found: list[Completion] = []
    while len(found) < len(seeds):
        left = seeds[len(found) :]
        with call_scope(replace(scope, sample_index=scope.sample_index + len(found))):
            try:
                if found:
                    for _ in range(_calls_for(lm, len(left))):
                        count_extra_call(is_reported=True)
                fresh = await lm.complete(request, len(left), left)
            except BudgetError:
                if not found:
                    raise
                break
            except ProviderError as exc:
                if not found:
                    raise
                ctx.failed.append(exc)
                break
            except asyncio.CancelledError:
                ctx.failed.append(ProviderError("stopped on its way", kind="connection"))
                raise
        if not fresh:
            break
        priced = [_with_known_cost(reply, price) for reply in fresh]
        ctx.spend(role, sum((reply.usage for reply in priced), Usage()))
        found.extend(priced)
    return found[: len(seeds)]


def _calls_for(lm: LM, n: int) -> int:
    return 1 if lm.prefers_n else n


def _with_known_cost(reply: Completion, price: Price | None) -> Completion:
    """Return a reply with its cost where the LM did not say it and the price is known."""
    if price is None or reply.usage.cost_usd is not None:
        return reply
    return replace(reply, usage=with_cost(reply.usage, price))


def worst_of(lm: LM, calls: int, prompt_tokens: int, completion_tokens: int) -> dict[str, float]:
    """Return what so many calls may use at most, each with such a prompt, all with such replies;
    `cost_usd` is in it where the price is known."""
    amounts = {
        "calls": float(calls),
        "prompt_tokens": float(calls * prompt_tokens),
        "completion_tokens": float(completion_tokens),
    }
    price = price_of(lm)
    if price is not None:
        amounts["cost_usd"] = price.worst_usd(calls * prompt_tokens, completion_tokens)
    return amounts


T = TypeVar("T")


async def together(jobs: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Run jobs side by side and return all results; where some fail the first failure is raised
    once the others, which are paid for, have ended."""
    results = await asyncio.gather(*jobs, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return [r for r in results if not isinstance(r, BaseException)]


class LMExpander:
    """Asks a model for the next action.

    Args:
        lm: the model; pass one that retries and keeps a journal.
        tools: what the model may call.
        system: further instructions.
        sampling: how to draw; a temperature of 0 makes all samples equal.
        form: `native` uses the provider's tool calls; `text` describes the tools in the prompt and
            reads `Action: name {…}`, for models and engines without tool calls.
        describe_tools: with `text`, put the tools' schemas into the prompt; small models do better
            with worked examples alone.
        show_siblings: tell the model what was tried from here before, for one-at-a-time search.
    """

    def __init__(
        self,
        lm: LM,
        tools: Sequence[ToolSpec] = (),
        *,
        system: str = "",
        sampling: Sampling | None = None,
        form: Form = "native",
        describe_tools: bool = True,
        show_siblings: bool = False,
    ) -> None:
        self.lm, self.tools, self.form = lm, tuple(tools), form
        self._wire = wire_names(t.name for t in self.tools)
        self._sent = tuple(replace(t, name=self._wire[t.name]) for t in self.tools)
        self.sampling = sampling or Sampling(temperature=0.8, max_tokens=512)
        self.show_siblings = show_siblings
        self.invalid = 0
        """Samples that could not be read as an action."""
        rows = "\n".join(json.dumps(t.to_dict(), ensure_ascii=False) for t in self.tools)
        describes = form == "text" and describe_tools and bool(self.tools)
        described = render("search_agent", tools=rows) if describes else ""
        self._system = "\n\n".join(t for t in (system, described) if t)

    def request(self, ctx: SearchContext, node: Node) -> Request:
        """Return the request at a node."""
        head = render_messages(ctx.task.messages, ctx.context, system=self._system)
        path = path_messages(ctx.tree, node)
        if self.form == "text":
            path = [_as_text(m) for m in path]
        messages = [*head, *path]
        if self.show_siblings and node.children:
            tried = [show_action(ctx.tree[i].action, 400) for i in node.children]
            text = render("search_siblings", tried="\n".join(f"- {t}" for t in tried))
            messages.append(Message("user", text))
        sampling = self.sampling
        if ctx.work.prefix:
            messages.append(Message("assistant", ctx.work.prefix))
            going_on = {"continue_final_message": True, "add_generation_prompt": False}
            sampling = replace(sampling, extra={**sampling.extra, **going_on})
        native = self._sent if self.form == "native" else ()
        sent = tuple(_on_the_wire(m, self._wire) for m in messages)
        return Request(sent, tools=native, sampling=sampling)

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return what one visit may use: tokens from the size of the text and the token limit."""
        size = sum(len(m.content.encode()) + 16 for m in self.request(ctx, node).messages)
        size += sum(len(json.dumps(t.to_dict())) for t in self.tools)
        reply = self.sampling.max_tokens or ASSUMED_REPLY_TOKENS
        return worst_of(self.lm, _calls_for(self.lm, k), size, k * reply)

    async def propose(self, ctx: SearchContext, node: Node, k: int) -> list[Proposal]:
        """Draw k samples and return those that are actions; equal ones are merged later.

        Raises:
            ProviderError: the call failed.
        """
        scope = CallScope("search", ctx.task.task_id, f"node-{node.id}", ctx.first_sample)
        drawn = await draw(self.lm, self.request(ctx, node), k, ctx, scope, role="propose")
        offered = []
        for completion in drawn:
            proposal = self._read(completion, ctx.work.prefix)
            if proposal is None:
                self.invalid += 1
            else:
                offered.append(proposal)
        return offered

    def _read(self, completion: Completion, prefix: str) -> Proposal | None:
        if completion.finish == "content_filter":
            return None  # what a filter left is no step of the model's
        action = self._action(completion, prefix)
        if action is None:
            return None
        top = completion.top_logprobs or ()
        return Proposal(
            action,
            text=prefix + completion.text,
            entropy=first_entropy(top),
            tokens=_tokens(completion),
            top_logprobs=tuple(dict(row) for row in top),
            token_ids=completion.token_ids,
            logprobs=completion.logprobs,
            prompt_token_ids=completion.prompt_token_ids,
            is_truncated=completion.finish == "length",
        )

    def _action(self, completion: Completion, prefix: str) -> Any:
        """Return the action of a reply: a tool call, the final answer, or a step of text."""
        text = (prefix + completion.text).strip()
        asked = completion.tool_calls[0] if completion.tool_calls else None
        if asked is None and self.tools:
            asked = parse_action(text)
        if asked is not None:
            try:
                own = {form: name for name, form in self._wire.items()}
                name = own.get(asked.name, asked.name)
                return call(name, **parse_arguments(asked.arguments))
            except ValueError:
                return None
        if not text:
            return None
        return call(FINISH, answer=text) if self.tools else text


def _on_the_wire(message: Message, names: Mapping[str, str]) -> Message:
    """Return a turn whose calls have the names that the server was told."""
    if not message.tool_calls:
        return message
    calls = tuple(replace(c, name=names.get(c.name, c.name)) for c in message.tool_calls)
    return replace(message, tool_calls=calls)


def _as_text(message: Message) -> Message:
    """Return a turn of the path without the provider's tool calls."""
    if message.tool_calls:
        asked = message.tool_calls[0]
        return Message("assistant", f"Action: {asked.name} {asked.arguments}")
    if message.role == "tool":
        return Message("user", f"Observation: {message.content}")
    return message


def _tokens(completion: Completion) -> tuple[str, ...]:
    """Return the texts of the drawn tokens: the alternative with the drawn log-probability."""
    if not completion.top_logprobs or not completion.logprobs:
        return ()
    found = []
    for row, drawn in zip(completion.top_logprobs, completion.logprobs):
        found.append(min(row, key=lambda t: abs(row[t] - drawn)) if row else "")
    return tuple(found)


def _steps_text(tree: Tree, parent: Node, node: Node | None = None) -> str:
    nodes = tree.path(parent)[1:] + ([node] if node is not None else [])
    lines = []
    for i, at in enumerate(nodes, 1):
        lines.append(f"{i}. {show_action(at.action, 400)}")
        if at.observation:
            lines.append(f"   -> {' '.join(at.observation.split())[:400]}")
    return "\n".join(lines) or "(none)"


_SCORE = re.compile(r"Score:\s*(\d+(?:\.\d+)?)", re.IGNORECASE)


class JudgeScorer:
    """Asks a model how promising each child is; the value is in [0, 1].

    Args:
        samples: judgements averaged; one that cannot be read is left out, and where none can, the
            child takes its share of the samples as its value.
    """

    is_additive = True

    def __init__(self, lm: LM, *, samples: int = 1, sampling: Sampling | None = None) -> None:
        self.lm, self.samples = lm, samples
        self.sampling = sampling or Sampling(temperature=0.7, max_tokens=64)

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the calls of judging k children."""
        calls = k * _calls_for(self.lm, self.samples)
        size = len(_steps_text(ctx.tree, node).encode()) + len(ctx.task.text.encode()) + 1_000
        reply = (self.sampling.max_tokens or ASSUMED_REPLY_TOKENS) * self.samples * k
        return worst_of(self.lm, calls, size, reply)

    async def score(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[NodeScore]:
        """Judge all children at once."""
        return await together([self._one(ctx, parent, n) for n in nodes])

    async def _one(self, ctx: SearchContext, parent: Node, node: Node) -> NodeScore:
        steps = _steps_text(ctx.tree, parent, node)
        text = render("search_judge", task=ctx.task.text, steps=steps)
        request = Request((Message("user", text),), sampling=self.sampling)
        scope = CallScope("search", ctx.task.task_id, f"judge-{parent.id}", 0)
        drawn = await draw(self.lm, request, self.samples, ctx, scope, role="score")
        marks = [float(m[-1]) for c in drawn if (m := _SCORE.findall(c.text))]
        marks = [min(10.0, mark) / 10 for mark in marks]
        if not marks:
            return NodeScore(1.0 - node.prior, 0.0, node.prior, {"unread": 1.0})
        value = sum(marks) / len(marks)
        return NodeScore(1.0 - value, 0.0, value, {"judge": value})


class LMImagination:
    """Has a model write the remaining steps and counts them; asking for a number is overconfident.

    Args:
        per: `child` asks once a child; `parent` once a visit, for all of its children.
    """

    def __init__(
        self,
        lm: LM,
        tools: Sequence[ToolSpec] = (),
        *,
        sampling: Sampling | None = None,
        per: Literal["child", "parent"] = "parent",
    ) -> None:
        self.lm, self.per = lm, per
        self.sampling = sampling or Sampling(temperature=0.0, max_tokens=256)
        self._tools = "\n".join(f"{t.name}: {t.description}" for t in tools) or "(none)"

    def estimate(self, ctx: SearchContext, node: Node, k: int) -> Mapping[str, float]:
        """Return the calls of imagining the rest of k plans, or of one for all."""
        calls = 1 if self.per == "parent" else k
        texts = (_steps_text(ctx.tree, node), ctx.task.text, self._tools)
        size = sum(len(t.encode()) for t in texts) + 1_500
        reply = (self.sampling.max_tokens or ASSUMED_REPLY_TOKENS) * calls
        return worst_of(self.lm, calls, size, reply)

    async def total_steps(
        self, ctx: SearchContext, parent: Node, nodes: Sequence[Node]
    ) -> list[float]:
        """Return, one a child, the length of the whole plan, at least the steps done."""
        if self.per == "parent":
            left = await self._left(ctx, parent, None)
            return [max(float(n.depth), parent.depth + left) for n in nodes]
        left_by_child = await together([self._left(ctx, parent, n) for n in nodes])
        return [n.depth + steps for n, steps in zip(nodes, left_by_child)]

    async def _left(self, ctx: SearchContext, parent: Node, node: Node | None) -> float:
        text = render(
            "search_imagine",
            tools=self._tools,
            task=ctx.task.text,
            steps=_steps_text(ctx.tree, parent, node),
        )
        request = Request((Message("user", text),), sampling=self.sampling)
        scope = CallScope("search", ctx.task.task_id, f"imagine-{parent.id}", 0)
        drawn = await draw(self.lm, request, 1, ctx, scope, role="imagine")
        lines = [x.strip() for x in drawn[0].text.splitlines() if x.strip()] if drawn else []
        return 0.0 if lines[:1] and lines[0].lower().startswith("none") else float(len(lines))
