"""A verifier from settings, as they stand in a configuration file.

Nothing is imported that the settings do not name. Does not know tasks. Source: own.
"""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Mapping
from typing import Any

from pydantic import ConfigDict, TypeAdapter, ValidationError

from tfgrpo.config.flat_options import flat_parameters, gathered
from tfgrpo.errors import ConfigError
from tfgrpo.policies.tools import Tool, tool
from tfgrpo.protocols import LM, Limits, Sampling, ToolSpec, Verifier
from tfgrpo.runtime.import_string import load_object
from tfgrpo.verifiers.arena import Arena, PairJudge, WinRate
from tfgrpo.verifiers.code import Code
from tfgrpo.verifiers.exact import Exact, Regex
from tfgrpo.verifiers.function import FunctionVerifier, Weighted
from tfgrpo.verifiers.json_schema import JsonSchema
from tfgrpo.verifiers.judge import Judge
from tfgrpo.verifiers.majority import Majority
from tfgrpo.verifiers.math import Math
from tfgrpo.verifiers.numeric import Numeric
from tfgrpo.verifiers.tool_calls import ToolCalls

__all__ = ["GROUP_KINDS", "make_verifier"]

OpenLM = Callable[..., LM]

_PLAIN: dict[str, Callable[..., Verifier]] = {
    "exact": Exact,
    "numeric": Numeric,
    "regex": Regex,
    "json_schema": JsonSchema,
    "math": Math,
    "code": Code,
    "majority": Majority,
}
_KINDS = (*_PLAIN, "judge", "function", "tool_calls", "weighted", "arena", "win_rate")
GROUP_KINDS = ("majority", "arena", "win_rate")
"""Kinds that score the rollouts of a group against each other: of use in training alone."""


def make_verifier(config: Mapping[str, Any] | str, *, open_lm: OpenLM | None = None) -> Verifier:
    """Return the verifier that settings describe.

    `kind` is one of exact, numeric, regex, json_schema, math, code, majority, judge, function,
    tool_calls, weighted, arena, win_rate; the other keys are the keyword arguments of that class.
    A text is a kind without settings. Further keys:

    * `judge`: `rubric`, `lm` (a spec; may be left out where `open_lm` knows a default), `options`
      (of the LM), `sampling` and `limits` as tables.
    * `function`: `function` = "module:name".
    * `tool_calls`: `tools` = a list of "module:name".
    * `arena`: `base` = the settings of a verifier, and those of a judge; compares the answers of a
      whole group in pairs.
    * `win_rate`: those of a judge, and `verdicts`; the share of its group that an answer beats.
    * `weighted`: `parts` = name to the settings of a verifier, each with a `weight` (default 1),
      and `gate` = names of parts that must be full before the others are asked.

    Args:
        config: the settings.
        open_lm: called as `open_lm(spec, **options)` for a judge, `open_lm(**options)` without a
            spec; default is `tfgrpo.lm.open_lm`.

    Raises:
        ConfigError: an unknown kind or key, a value of the wrong type, or a value not allowed.
    """
    if isinstance(config, str):
        config = {"kind": config}
    settings = dict(config)
    kind = settings.pop("kind", None)
    if kind in _PLAIN:
        made = _PLAIN[kind]
        return made(**_checked(made, settings, f"verifier {kind!r}"))
    if kind == "judge":
        return _judge(settings, open_lm)
    if kind == "function":
        return _function(settings)
    if kind == "tool_calls":
        return _tool_calls(settings)
    if kind == "weighted":
        return _weighted(settings, open_lm)
    if kind == "arena":
        return _arena(settings, open_lm)
    if kind == "win_rate":
        keeps = settings.pop("verdicts", False)
        if not isinstance(keeps, bool):
            raise ConfigError(f"verifier 'win_rate': verdicts is {keeps!r:.80}; give true or false")
        lm, checked = _asking(PairJudge, "win_rate", settings, open_lm)
        return WinRate(lm, verdicts=keeps, **checked)
    raise ConfigError(f"verifier.kind is {kind!r}; allowed are {', '.join(_KINDS)}")


def _judge(settings: dict[str, Any], open_lm: OpenLM | None) -> Verifier:
    lm, checked = _asking(Judge, "judge", settings, open_lm)
    return Judge(lm, **checked)


def _arena(settings: dict[str, Any], open_lm: OpenLM | None) -> Verifier:
    base = settings.pop("base", None)
    if base is None:
        raise ConfigError("verifier 'arena': name the verifier that seeds it, as base = {kind = …}")
    lm, checked = _asking(PairJudge, "arena", settings, open_lm)
    return Arena(make_verifier(base, open_lm=open_lm), lm, **checked)


def _asking(
    made: Callable[..., Any], kind: str, settings: dict[str, Any], open_lm: OpenLM | None
) -> tuple[LM, dict[str, Any]]:
    """The LM that a verifier asks, and its other settings, checked."""
    spec, options = settings.pop("lm", None), settings.pop("options", {})
    for name, hint in (("sampling", Sampling), ("limits", Limits)):
        if name in settings:
            table = settings[name]
            if not isinstance(table, Mapping):
                raise ConfigError(f"verifier {kind!r}: {name} is {table!r:.80}; give a table")
            settings[name] = hint(**_checked(hint, dict(table), f"verifier {kind!r}, {name}"))
    if open_lm is None:
        if not spec:
            raise ConfigError(
                f"verifier {kind!r}: name the judge's model, such as lm = 'openai:...'"
            )
        from tfgrpo.lm import open_lm as default  # backends are loaded only where one is asked for

        open_lm = default
    checked = _checked(made, {"lm": None, **settings}, f"verifier {kind!r}", given={"lm"})
    checked.pop("lm", None)
    return (open_lm(spec, **options) if spec else open_lm(**options)), checked


def _function(settings: dict[str, Any]) -> Verifier:
    name = settings.pop("function", None)
    fn = load_object(name, "verifier 'function': function")
    settings.setdefault("verifier_id", f"function:{name}")
    checked = _checked(
        FunctionVerifier, {"fn": fn, **settings}, "verifier 'function'", given={"fn"}
    )
    return FunctionVerifier(**checked)


def _tool_calls(settings: dict[str, Any]) -> Verifier:
    names = settings.pop("tools", None)
    if not isinstance(names, (list, tuple)) or not names:
        raise ConfigError(
            f"verifier 'tool_calls': tools is {names!r:.80}; list 'module:name' texts"
        )
    specs: list[ToolSpec] = []
    for name in names:
        found = load_object(name, "verifier 'tool_calls': tools")
        specs.append((found if isinstance(found, Tool) else tool(found)).spec)
    checked = _checked(
        ToolCalls, {"specs": specs, **settings}, "verifier 'tool_calls'", given={"specs"}
    )
    return ToolCalls(**checked)


def _weighted(settings: dict[str, Any], open_lm: OpenLM | None) -> Verifier:
    parts, gate = settings.pop("parts", None), settings.pop("gate", ())
    if not isinstance(gate, (list, tuple)) or not all(isinstance(n, str) for n in gate):
        raise ConfigError(f"verifier 'weighted': gate is {gate!r:.80}; list names of parts")
    if not isinstance(parts, Mapping) or not all(isinstance(p, Mapping) for p in parts.values()):
        raise ConfigError(
            f"verifier 'weighted': parts is {parts!r:.80}; give a table of verifiers by name"
        )
    if settings:
        raise ConfigError(
            f"verifier 'weighted': unknown key {next(iter(settings))!r}; only parts and gate"
        )
    made: dict[str, tuple[Verifier, float]] = {}
    for name, part in parts.items():
        rest = {k: v for k, v in part.items() if k != "weight"}
        weight = part.get("weight", 1.0)
        if isinstance(weight, bool) or not isinstance(weight, (int, float)):
            raise ConfigError(f"verifier 'weighted': weight of {name!r} is {weight!r}; a number")
        made[name] = (make_verifier(rest, open_lm=open_lm), float(weight))
    return Weighted(made, gate)


def _checked(
    made: Callable[..., Any],
    settings: dict[str, Any],
    where: str,
    given: frozenset[str] | set[str] = frozenset(),
) -> dict[str, Any]:
    """Return the settings checked against the parameters of `made`; `given` ones are ours."""
    parameters = flat_parameters(made)
    checked: dict[str, Any] = {}
    for key, value in settings.items():
        if key not in parameters:
            near = difflib.get_close_matches(key, parameters, 1)
            meant = f"; did you mean {near[0]!r}?" if near else ""
            known = ", ".join(p for p in parameters if p not in given)
            raise ConfigError(f"{where}: unknown key {key!r}{meant} (known: {known})")
        if key in given:
            checked[key] = value
            continue
        hint = parameters[key].annotation
        adapter = (
            None
            if _is_own(hint)
            else TypeAdapter(hint, config=ConfigDict(arbitrary_types_allowed=True))
        )
        try:
            # Lenient only where TOML lacks a type (tuples); never from text to number.
            if adapter is None or isinstance(value, (list, tuple, Mapping)):
                checked[key] = value if adapter is None else adapter.validate_python(value)
            else:
                checked[key] = adapter.validate_python(value, strict=True)
        except ValidationError as exc:
            raise ConfigError(
                f"{where}: {key} is {value!r:.80}: {exc.errors()[0]['msg']}"
            ) from None
    missing = [
        n
        for n, p in parameters.items()
        if p.default is p.empty and n not in settings and p.kind is not p.VAR_KEYWORD
    ]
    if missing:
        raise ConfigError(f"{where}: {missing[0]!r} is missing; it has no default")
    return gathered(made, checked)


def _is_own(hint: Any) -> bool:
    """Whether a hint names records of ours, which the caller has built already."""
    return any(
        getattr(a, "__module__", "").startswith("tfgrpo") and inspect.isclass(a)
        for a in (hint, *getattr(hint, "__args__", ()))
    )
