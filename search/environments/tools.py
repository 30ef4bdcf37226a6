"""A user's own tools as an environment, with everything that they can do wrong contained.

A tool that raises, hangs, answers with megabytes or changes what it should not is an outcome with
a note, and stands in `report()`:

* it runs in a thread with a time limit (async tools are cancelled); after `max_hangs` hangs it is
  not called any more;
* it gets a copy of the state, so that siblings never see its changes; a tool declared `pure` or
  `read` that changes its copy is reported and the change dropped;
* its answer is cut at `ToolRules.max_observation_bytes`, with the full length told;
* arguments are checked against the schema before anything runs.

`audit` runs calls twice from the same state and tells which answers differ: tools that keep state
where no copy reaches, such as a module's global.

Does not know models. Needs `jsonschema` (through `tfgrpo.policies.tools`). Source: own.
"""

from __future__ import annotations

import copy
import inspect
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from tfgrpo.errors import ConfigError, PolicyError
from tfgrpo.policies.tools import Tool, check_arguments, tool
from tfgrpo.protocols import ToolSpec
from tfgrpo.runtime.canonical import shown_as_json
from tfgrpo.runtime.user_code import CallTimeout, call_foreign
from tfgrpo.search.environments.protocol import (
    Effect,
    StepResult,
    finish_outcome,
    state_key_of,
)
from tfgrpo.search.node import FINISH, action_name

__all__ = [
    "FINISH_TOOL",
    "ToolEnvironment",
    "ToolReport",
    "ToolRules",
    "specs_from_openai",
    "stateful_tool",
]

FINISH_TOOL = ToolSpec(
    FINISH,
    "Call this when the task is done. Give the final answer.",
    {"type": "object", "properties": {"answer": {"type": "string"}}},
)


def stateful_tool(fn: Callable[..., Any], **options: Any) -> Tool:
    """Return a tool from a function whose first parameter is the state and not the model's.

    >>> def open_door(state: dict, name: str) -> str:
    ...     '''Open a door.'''
    ...     state[name] = "open"
    ...     return "opened"
    >>> list(stateful_tool(open_door).spec.parameters["properties"])
    ['name']
    """
    signature = inspect.signature(fn)
    parameters = list(signature.parameters.values())
    if not parameters:
        raise ConfigError(f"tool {fn!r}: its first parameter must be the state")
    hints = get_type_hints(fn, include_extras=True)
    hints.pop(parameters[0].name, None)

    def seen(**arguments: Any) -> Any:
        raise NotImplementedError  # only its signature is used

    seen.__name__ = options.pop("name", "") or fn.__name__
    seen.__doc__ = fn.__doc__
    seen.__annotations__ = hints
    seen.__signature__ = signature.replace(parameters=parameters[1:])  # type: ignore[attr-defined]  # read by inspect
    made = tool(seen, **options)
    return Tool(made.spec, fn, made.timeout_s)


def specs_from_openai(tools: Sequence[Mapping[str, Any]]) -> list[ToolSpec]:
    """Return the specs of tools in OpenAI's form (`{"type": "function", "function": {…}}`)."""
    specs = []
    for row in tools:
        fields = row.get("function", row)
        if "name" not in fields:
            raise ConfigError(f"a tool in OpenAI's form needs a name: {row!r:.200}")
        parameters = fields.get("parameters") or {"type": "object", "properties": {}}
        specs.append(ToolSpec(fields["name"], fields.get("description", ""), parameters))
    return specs


@dataclass(slots=True)
class ToolReport:
    """What happened to one tool."""

    calls: int = 0
    errors: int = 0
    hangs: int = 0
    cut_answers: int = 0
    mutations: int = 0
    """Times a tool declared `pure` or `read` changed the state it was given."""
    refused: int = 0


@dataclass(frozen=True, slots=True)
class ToolRules:
    """How far tools are trusted."""

    timeout_s: float = 30.0
    """Limit of one call; a tool's own limit wins."""
    max_observation_bytes: int = 64_000
    """Longer answers are cut."""
    max_hangs: int = 2
    """Hangs after which a tool is not called any more; its threads cannot be killed."""
    is_simulator: bool | None = None
    """Whether nothing real can happen; None: where there is a state."""


_RULES = ToolRules()


class ToolEnvironment:
    """Tools over a state, or without one.

    Args:
        tools: `Tool`s or plain functions. With a `state`, each takes it as its first parameter
            (see `stateful_tool`) and changes it in place.
        state: the first state, anything that `copy.deepcopy` can copy; None for stateless tools.
        goal: whether a state solves the task.
        effects: tool name to effect class; the default is `reversible` with a state (the copy is
            the undo) and `irreversible` without one.
        rules: limits of calls and answers, and whether anything real can happen.
        finish: offer the `finish` tool, whose call ends a path.
    """

    def __init__(
        self,
        tools: Sequence[Tool | Callable[..., Any]],
        *,
        state: Any = None,
        goal: Callable[[Any], bool] | None = None,
        key: Callable[[Any], str | None] | None = None,
        effects: Mapping[str, Effect] | None = None,
        rules: ToolRules = _RULES,
        finish: bool = True,
    ) -> None:
        self._has_state = state is not None
        make = stateful_tool if self._has_state else tool
        self._tools = {
            t.spec.name: t for t in (t if isinstance(t, Tool) else make(t) for t in tools)
        }
        self._state, self._goal = copy.deepcopy(state), goal
        self._key = key or state_key_of
        self._effects = dict(effects or {})
        self._rules, self._finish = rules, finish
        is_simulator = rules.is_simulator
        self.is_simulator = self._has_state if is_simulator is None else is_simulator
        self.reports = {name: ToolReport() for name in self._tools}
        unknown = self._effects.keys() - self._tools.keys()
        if unknown:
            raise ConfigError(
                f"effects are declared for unknown tools {sorted(unknown)}; there are "
                f"{', '.join(sorted(self._tools))}"
            )

    @property
    def specs(self) -> tuple[ToolSpec, ...]:
        """The tools as a model sees them, the finish tool last."""
        own = tuple(t.spec for t in self._tools.values())
        return (*own, FINISH_TOOL) if self._finish else own

    def check(self, action: Any) -> tuple[str, ...]:
        """Return why a call cannot work; for `CheckedExpander`."""
        name = action_name(action)
        if name == FINISH and self._finish:
            return ()
        known = self._tools.get(name)
        if known is None or not isinstance(action, Mapping):
            return (f"unknown tool {name!r:.80}; there are {', '.join(self._tools)}",)
        arguments = action.get("arguments")
        if not isinstance(arguments, Mapping):
            return (f"tool {name!r}: the arguments are no JSON object",)
        return check_arguments(known.spec.parameters, arguments)

    async def start(self) -> Any:
        """Return the first state."""
        return self._state if self._has_state else ()

    async def apply(self, handle: Any, action: Any) -> StepResult:
        """Run one call on a copy of the state."""
        name = action_name(action)
        if name == FINISH and self._finish:
            arguments = action.get("arguments", {}) if isinstance(action, Mapping) else {}
            answer = str(arguments.get("answer", ""))
            goal = None if self._goal is None else bool(self._goal(handle))
            return StepResult(handle, answer, self.key(handle), True, goal, tool_calls=0)
        reasons = self.check(action)
        if reasons:
            return StepResult(error=f"tool {name!r:.80}: {reasons[0]}", tool_calls=0)
        report = self.reports[name]
        if report.hangs >= self._rules.max_hangs:
            report.refused += 1
            return StepResult(
                error=f"tool {name!r} is not called any more: it hung {report.hangs} times",
                notes=("refused",),
                tool_calls=0,
            )
        return await self._run(handle, name, dict(action["arguments"]), report)

    async def _run(
        self, handle: Any, name: str, arguments: dict[str, Any], report: ToolReport
    ) -> StepResult:
        known = self._tools[name]
        state = copy.deepcopy(handle)
        given = (state,) if self._has_state else ()
        report.calls += 1
        try:
            result = await call_foreign(
                known.run,
                *given,
                error=PolicyError,
                where=f"tool {name!r}",
                timeout_s=known.timeout_s or self._rules.timeout_s,
                named=copy.deepcopy(arguments),
            )
        except CallTimeout as exc:
            report.hangs += 1
            return StepResult(error=str(exc), notes=("hung",))
        except PolicyError as exc:
            report.errors += 1
            return StepResult(error=str(exc))
        return self._outcome(handle, state, name, result, report)

    def _outcome(
        self, handle: Any, state: Any, name: str, result: Any, report: ToolReport
    ) -> StepResult:
        notes: tuple[str, ...] = ()
        if self._has_state and self._effect_of(name) in ("pure", "read"):
            if self._key(state) != self._key(handle) or state != handle:
                report.mutations += 1
                notes = ("changed the state though declared to read",)
            state = handle
        made = result if isinstance(result, StepResult) else StepResult(observation=_text(result))
        if made.error:
            report.errors += 1
            return made
        observation, cut = self._cut(made.observation)
        if cut:
            report.cut_answers += 1
            notes = (*notes, "answer cut")
        outcome = StepResult(
            state if self._has_state else (),
            observation,
            made.state_key,
            made.is_terminal,
            made.is_goal,
            made.reward,
            notes=(*made.notes, *notes),
            usage=made.usage,
        )
        return finish_outcome(outcome, self.key, self._goal)

    def _cut(self, text: str) -> tuple[str, bool]:
        data, most = text.encode("utf-8", "replace"), self._rules.max_observation_bytes
        if len(data) <= most:
            return text, False
        head = data[:most].decode("utf-8", "ignore")
        return f"{head}\n[cut: {len(data):,} bytes in all, {most:,} shown]", True

    async def audit(self, actions: Sequence[Any]) -> dict[str, str]:
        """Run each call twice from the first state; return, by tool, how the answers differ.

        Runs tools: for simulators and tools that may run twice only.
        """
        found: dict[str, str] = {}
        for action in actions:
            start = await self.start()
            first, second = await self.apply(start, action), await self.apply(start, action)
            if (first.observation, first.state_key) != (second.observation, second.state_key):
                found[action_name(action)] = (
                    f"the same call from the same state answered {first.observation!r:.80}, then "
                    f"{second.observation!r:.80}: it keeps state elsewhere or draws at random"
                )
        return found

    def fork(self, handle: Any) -> Any:
        """The copy is made when the state is used."""
        return handle

    def release(self, handle: Any) -> None:
        """Nothing to free."""

    def key(self, handle: Any) -> str | None:
        """Return the state's text; None for tools without a state of ours."""
        return self._key(handle) if self._has_state else None

    def effects(self, action: Any) -> Effect:
        """Return the declared effect of a call."""
        name = action_name(action)
        return "pure" if name == FINISH else self._effect_of(name)

    def _effect_of(self, name: str) -> Effect:
        return self._effects.get(name, "reversible" if self._has_state else "irreversible")


def _text(result: Any) -> str:
    if isinstance(result, str):
        return result
    return json.dumps(shown_as_json(result), ensure_ascii=False)
