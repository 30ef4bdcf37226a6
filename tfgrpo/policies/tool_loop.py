"""The tool loop: reply, run the tools it asks for, show the results, until it answers.

Native tool calls where the server knows them; else the ReAct text form `Action: name {json}`.
Whatever goes wrong with a call (no such tool, wrong arguments, a raising or slow tool) is told to
the model as an observation, since coping with that is part of the task. What goes wrong with the
LM ends the attempt.

Does not know: references, rewards, what tools do. Source: ReAct (Yao et al., 2023).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal, get_args

from tfgrpo.context import Context, render_messages
from tfgrpo.errors import ConfigError, PolicyError, ProviderError, boundary
from tfgrpo.messages import Message, ToolCall
from tfgrpo.policies.attempt import (
    cause_of,
    check_sampling,
    new_rollout,
    provider_failure,
    step_of,
)
from tfgrpo.policies.tool_calls import parse_action, parse_arguments, resolve_name
from tfgrpo.policies.tools import Tool
from tfgrpo.prompts import load, render
from tfgrpo.protocols import LM, Completion, Limits, Request, Sampling, ToolSpec
from tfgrpo.rollout import Rollout, Step, Task, Usage
from tfgrpo.runtime.canonical import canonical_json, derive_seed, digest, shown_as_json
from tfgrpo.runtime.json_schema import check_arguments, check_schema
from tfgrpo.runtime.terminal import clip
from tfgrpo.runtime.texts.repetition import MAX_CYCLES, MAX_REPEATS, goes_round
from tfgrpo.runtime.texts.tool_names import wire_names
from tfgrpo.runtime.user_code import CallTimeout, call_foreign

__all__ = ["ToolLoop", "ToolMode", "ToolPolicy", "offer_text", "run_call"]

ToolMode = Literal["auto", "native", "text"]
"""`native`: tools go to the server in its own form; `text`: they stand in the system text;
`auto`: native, and text from the moment the server refuses a request with tools."""


@dataclass(frozen=True, slots=True)
class ToolLoop:
    """How tools are offered, and how far a loop may go. All of it is part of the policy's identity.

    Raises:
        ConfigError: no such mode, or a limit that is not above 0.
    """

    mode: ToolMode = "auto"
    max_steps: int = 10
    """Replies of the model in one attempt."""
    max_calls_a_step: int = 16
    """Calls run of one reply; the rest are refused, and the model is told."""
    max_observation_chars: int = 8000
    """Longest observation; longer ones keep their head and tail."""
    tool_timeout_s: float = 60.0
    """Limit of one call in seconds, for tools without a limit of their own."""
    max_repeats: int = MAX_REPEATS
    """Equal calls with equal results in a row, before the attempt ends with `no_progress`; a tool
    that says `is_read` is not run again for them, but answered from what it said."""
    max_cycles: int = MAX_CYCLES
    """Repetitions of a cycle of two to eight such calls, before the attempt ends so."""

    def __post_init__(self) -> None:
        if self.mode not in get_args(ToolMode):
            raise ConfigError(
                f"ToolPolicy: mode is {self.mode!r}; allowed are 'auto', 'native', 'text'"
            )
        for name, limit in self.limits.items():
            if limit <= 0:
                raise ConfigError(f"ToolPolicy: {name} is {limit}; it must be above 0")

    @property
    def limits(self) -> dict[str, float]:
        """The limits by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "mode"}


_LOOP = ToolLoop()


class ToolPolicy:
    """An LM in a loop with tools.

    Args:
        lm: what writes.
        tools: the tools, or a function that makes fresh ones for each attempt (for tools that
            keep state, such as a simulated shop).
        system: system text before tools and lessons.
        loop: how tools are offered, and how far the loop may go.
        sampling, limits: of every call of the LM.
        policy_id: a name of your own. The default is fixed by LM, texts, schemas and limits, not
            by what the tools' code does: give your own where that changes.

    The rollout's metadata tells `mode`, `tool_calls` (how many were run) and `stopped`: `answer`,
    `max_steps`, `no_progress` or `truncated`. An attempt that ran out of steps or went round in
    circles is `ungraded` like any other, for what it did up to there can be judged.

    Names that servers refuse (`coding.start`) are sent in the form of `tool_names.wire_names`;
    rollouts hold the tools' own names.
    """

    def __init__(
        self,
        lm: LM,
        tools: Sequence[Tool] | Callable[[], Sequence[Tool]],
        *,
        system: str = "",
        loop: ToolLoop = _LOOP,
        sampling: Sampling | None = None,
        limits: Limits | None = None,
        policy_id: str | None = None,
    ) -> None:
        self._lm = lm
        self._make_tools = tools if callable(tools) else lambda: tools
        self._system = system
        self._loop = loop
        self._refuses_tools = False
        self._sampling = sampling or Sampling()
        self._limits = limits or Limits()
        sample = list(self._make_tools())
        self._specs = tuple(t.spec for t in sample)
        self._wire = wire_names(s.name for s in self._specs)
        self._sent = tuple(replace(s, name=self._wire[s.name]) for s in self._specs)
        _check(self._specs)
        check_sampling(self._sampling, "ToolPolicy")
        self._policy_id = policy_id or "tools-" + digest(
            {
                "lm": lm.identity,
                "system": system,
                "sampling": self._sampling,
                "tools": [t.spec.to_dict() | {"timeout_s": t.timeout_s} for t in sample],
                "bounds": loop.limits,
                "mode": loop.mode,
                "prompts": [load("react_tools"), load("react_observation")],
            },
            16,
        )

    @property
    def policy_id(self) -> str:
        """Fixed by the LM's identity, system text, sampling, tool schemas, mode and limits."""
        return self._policy_id

    @property
    def sampling(self) -> Sampling:
        """How tokens are drawn."""
        return self._sampling

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as the model sees them."""
        return self._specs

    async def attempt(self, task: Task, context: Context, seed: int) -> Rollout:
        """Return one attempt; at most `max_steps` LM calls, one more where tools are refused."""
        started = time.perf_counter()
        mode = self._loop.mode
        native = mode == "native" or (mode == "auto" and not self._refuses_tools)
        run = _Run(new_rollout(self._policy_id, task, seed), native)
        try:
            with boundary(PolicyError, f"policy {self._policy_id!r}"):
                by_name = {t.spec.name: t for t in self._make_tools()}
                done = await self._attempt(run, by_name, task, context, seed)
        except ProviderError as exc:
            done = provider_failure(run.rollout(), exc)
        except PolicyError as exc:
            done = run.rollout().failed("policy_failed", cause_of(exc))
        return replace(done, duration_s=time.perf_counter() - started)

    async def _attempt(
        self, run: _Run, tools: Mapping[str, Tool], task: Task, context: Context, seed: int
    ) -> Rollout:
        prompt = self._prompt(task, context, run.native)
        for number in range(self._loop.max_steps):
            draw_seed = seed if number == 0 else derive_seed(seed, number)
            try:
                reply = await self._reply(prompt, run, draw_seed)
            except ProviderError as exc:
                if not (run.native and self._loop.mode == "auto" and number == 0) or (
                    exc.kind != "bad_request"
                ):
                    raise
                self._refuses_tools, run.native = True, False
                run.usage += Usage(calls=1)
                prompt = self._prompt(task, context, run.native)
                reply = await self._reply(prompt, run, draw_seed)
            run.usage += reply.usage
            calls = [] if reply.finish == "length" else self._calls(reply, run.native)
            run.steps.append(step_of(reply))
            if reply.finish == "content_filter":
                return run.rollout("refused").failed(
                    "refused", "the provider's content filter ended the reply"
                )
            if not calls:
                stopped = "truncated" if reply.finish == "length" else "answer"
                return replace(run.rollout(stopped), is_truncated=reply.finish == "length")
            await self._observe(run, tools, calls, as_text=not reply.tool_calls)
            if run.goes_round(self._loop):
                return run.rollout("no_progress")
        return run.rollout("max_steps")

    def _prompt(self, task: Task, context: Context, native: bool) -> tuple[Message, ...]:
        if native:
            return render_messages(task.messages, context, system=self._system)
        system = "\n\n".join(t for t in (self._system, offer_text(self._specs)) if t)
        turns = render_messages(task.messages, context, system=system)
        return tuple(_as_text(m) for m in turns)

    async def _reply(self, prompt: tuple[Message, ...], run: _Run, seed: int) -> Completion:
        turns = tuple(m for s in run.steps for m in (s.action, *s.observations))
        sampling = self._sampling
        if not run.native:
            sampling = replace(sampling, stop=(*sampling.stop, "\nObservation:"))
        request = Request(
            tuple(_renamed(m, self._wire) for m in prompt + turns),
            tools=self._sent if run.native else (),
            sampling=sampling,
            limits=self._limits,
        )
        replies = await self._lm.complete(request, 1, [seed])
        if not replies:
            raise ProviderError(f"{self._lm.model_id} returned no reply", kind="bad_reply")
        reply = replies[0]
        own = {form: name for name, form in self._wire.items()}
        return replace(reply, tool_calls=_renamed(reply.message, own).tool_calls)

    def _calls(self, reply: Completion, native: bool) -> list[ToolCall]:
        if reply.tool_calls:
            return list(reply.tool_calls)
        written = parse_action(reply.text)
        if written is None:
            return []
        known = resolve_name(written.name, [s.name for s in self._specs]) is not None
        # Where tools were offered natively, a line that happens to read "Action: ..." is prose.
        return [written] if known or not native else []

    async def _observe(
        self, run: _Run, tools: Mapping[str, Tool], calls: Sequence[ToolCall], *, as_text: bool
    ) -> None:
        most = self._loop.max_calls_a_step
        for number, call in enumerate(calls):
            # In order, one after the other: a later call may rely on an earlier one's effect.
            if number < most:
                text = await self._result(run, tools, call)
            else:
                text = f"Error: not run; at most {most} calls in one reply are run"
            text = clip(text, self._loop.max_observation_chars)
            if as_text:
                message = Message("user", render("react_observation", text=text))
            else:
                message = Message("tool", text, tool_call_id=call.call_id)
            last = run.steps[-1]
            run.steps[-1] = replace(last, observations=(*last.observations, message))

    async def _result(self, run: _Run, tools: Mapping[str, Tool], call: ToolCall) -> str:
        """Run a call; one that only reads, made again on the same state, is answered from memory.

        The state is the calls made since that may have changed something.
        """
        key = _call_key(call)
        name = resolve_name(call.name, list(tools))
        is_read = name is not None and tools[name].is_read
        if is_read and key in run.read:
            text = run.read[key]
        else:
            run.n_calls += 1
            text, has_run = await run_call(call, tools, timeout_s=self._loop.tool_timeout_s)
            if has_run and not is_read:
                run.read.clear()
            elif has_run:
                run.read[key] = text
        run.exchanges.append(digest([key, text], 16))
        return text


async def run_call(
    call: ToolCall, tools: Mapping[str, Tool], *, timeout_s: float
) -> tuple[str, bool]:
    """Return what the model is told of a call, and whether the tool was run.

    Whatever goes wrong is told in the text and raises nothing.

    Args:
        call: as the model made it.
        tools: by name.
        timeout_s: limit of a tool without one of its own.
    """
    name = resolve_name(call.name, list(tools))
    if name is None:
        return f"Error: there is no tool {call.name!r}; the tools are {', '.join(tools)}", False
    tool = tools[name]
    try:
        arguments = parse_arguments(call.arguments)
    except ValueError as exc:
        return f"Error: the arguments of {name} are not a JSON object: {cause_of(exc)}", False
    if reasons := check_arguments(tool.spec.parameters, arguments):
        return f"Error: {name} was not run: {'; '.join(reasons)}", False
    try:
        result = await call_foreign(
            tool.run,
            error=PolicyError,
            where=f"tool {name!r}",
            timeout_s=timeout_s if tool.timeout_s is None else tool.timeout_s,
            named=arguments,
        )
        with boundary(PolicyError, f"tool {name!r}, result"):
            return _result_text(result), True
    except (PolicyError, CallTimeout) as exc:
        return f"Error: {cause_of(exc)}", True


def offer_text(specs: Sequence[ToolSpec]) -> str:
    """Return the system text that offers tools to a model that writes calls as text."""
    return render("react_tools", tools="\n".join(_describe(s) for s in specs))


@dataclass(slots=True)
class _Run:
    """One attempt while it runs."""

    blank: Rollout
    native: bool
    steps: list[Step] = field(default_factory=list)
    usage: Usage = field(default_factory=Usage)
    n_calls: int = 0
    exchanges: list[str] = field(default_factory=list)
    """Each call with its result, as one mark."""
    read: dict[str, str] = field(default_factory=dict)
    """What tools that only read said on the present state."""

    def goes_round(self, loop: ToolLoop) -> bool:
        """Return whether the last calls repeat themselves, results included."""
        return goes_round(self.exchanges, loop.max_repeats, loop.max_cycles)

    def rollout(self, stopped: str = "") -> Rollout:
        metadata: dict[str, Any] = {
            "mode": "native" if self.native else "text",
            "tool_calls": self.n_calls,
        }
        if stopped:
            metadata["stopped"] = stopped
        return replace(self.blank, steps=tuple(self.steps), usage=self.usage, metadata=metadata)


def _call_key(call: ToolCall) -> str:
    """Return one text for calls that mean the same: name and canonical arguments."""
    try:
        return digest([call.name, parse_arguments(call.arguments)], 16)
    except ValueError:
        return digest([call.name, call.arguments], 16)


def _renamed(message: Message, names: Mapping[str, str]) -> Message:
    """Return a turn whose calls have other names."""
    if not any(names.get(c.name, c.name) != c.name for c in message.tool_calls):
        return message
    calls = tuple(replace(c, name=names.get(c.name, c.name)) for c in message.tool_calls)
    return replace(message, tool_calls=calls)


def _check(specs: Sequence[ToolSpec]) -> None:
    names = [s.name for s in specs]
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ConfigError(f"ToolPolicy: two tools are named {twice[0]!r}; names must be unique")
    for spec in specs:
        check_schema(spec.parameters, f"schema of tool {spec.name!r}")


def _describe(spec: ToolSpec) -> str:
    return f"{spec.name}: {spec.description}\n  arguments: {canonical_json(spec.parameters)}"


def _as_text(message: Message) -> Message:
    """Return a turn without native calls, for servers that know none."""
    if message.role == "tool":
        return Message("user", render("react_observation", text=message.content))
    if message.tool_calls:
        lines = [f"Action: {c.name} {c.arguments}" for c in message.tool_calls]
        return Message(message.role, "\n".join([message.content, *lines]).strip())
    return message


def _result_text(result: Any) -> str:
    if isinstance(result, str):
        return result or "(no output)"
    return "(no output)" if result is None else canonical_json(shown_as_json(result))
