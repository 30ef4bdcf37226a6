"""From settings to what runs: each role's LM, journalled and retried, the policy and the verifier.

Raw LM → `JournaledLM` (cache, reserve, intent, result) → `RetryingLM` (retries, adaptive width).
Roles that name the same spec and options share one LM and one width. Workers build policy and
verifier from the same functions, over LMs of the run's endpoint.

Does not know: the learning loop. Source: own.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import fields
from typing import Any, cast

from tfgrpo.config.learn import Config, JudgeConfig, PolicyConfig, RoleConfig, SamplingConfig
from tfgrpo.errors import ConfigError
from tfgrpo.lm import fleet_options, open_lm
from tfgrpo.lm.limiter import AdaptiveLimiter
from tfgrpo.lm.retry import RetryingLM, RetryPolicy
from tfgrpo.policies.chat import ChatPolicy, FunctionPolicy
from tfgrpo.policies.tool_loop import ToolLoop, ToolPolicy
from tfgrpo.policies.tools import Tool, tool
from tfgrpo.protocols import LM, Policy, Sampling, Verifier
from tfgrpo.runtime.canonical import canonical_json, digest
from tfgrpo.runtime.import_string import load_object
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.verifiers import make_verifier

log = logging.getLogger(__name__)

OpenLM = Callable[..., LM]


class RunComponents:
    """The LMs of one run, opened on first use.

    Args:
        config: the resolved settings.
        store: where calls are journalled.
        opener: how a spec string becomes an LM; tests give their own.
    """

    def __init__(self, config: Config, store: Journal, opener: OpenLM = open_lm) -> None:
        self._config = config
        self._store = store
        self._opener = opener
        self._raw: list[LM] = []
        self.lms: dict[str, RetryingLM] = {}
        """Those opened so far, by name."""

    def lm(self, role: RoleConfig) -> RetryingLM:
        """Return the LM of a role; an empty spec means the policy's LM and options."""
        name = lm_name(self._config, role)
        if name not in self.lms:
            self.lms[name] = self._open(role)
        return self.lms[name]

    def _open(self, role: RoleConfig) -> RetryingLM:
        raw = open_role(self._config, role, self._opener)
        self._raw.append(raw)
        run = self._config.run
        limiter = AdaptiveLimiter(min(20, run.concurrency), run.concurrency, clock=time.monotonic)
        journaled = JournaledLM(raw, self._store, cache=run.cache, prices=run.prices or None)
        return RetryingLM(journaled, RetryPolicy(deadline_s=run.retry_deadline_s), limiter=limiter)

    def policy(self, *, practice: bool = False) -> Policy:
        """Return the policy that the settings describe; with `practice`, as practice draws from
        it."""
        return configured_policy(self._config, self.lm, practice=practice)

    def verifier(self) -> Verifier | None:
        """Return the verifier that the settings describe; as `configured_verifier`."""
        return configured_verifier(self._config, self.lm)

    async def aclose(self) -> None:
        """Close every LM that was opened."""
        for lm in self._raw:
            await lm.aclose()


def _spec_of(config: Config, role: RoleConfig) -> tuple[str, dict[str, Any]]:
    return (role.lm, role.options) if role.lm else (config.policy.lm, config.policy.options)


def open_role(config: Config, role: RoleConfig, opener: OpenLM = open_lm) -> LM:
    """Open the LM of a role, as the provider has it; an empty spec means the policy's LM and
    options. Raises as `open_lm`."""
    spec, options = _spec_of(config, role)
    return opener(spec, **{**fleet_options(spec, config.fleets), **options})


def lm_name(config: Config, role: RoleConfig) -> str:
    """Return what the LM of a role is called: equal for roles that share one."""
    return digest(list(_spec_of(config, role)), 16)


def configured_policy(
    config: Config, lm_of: Callable[[RoleConfig], LM], *, practice: bool = False
) -> Policy:
    """Return the policy that the settings describe; with `practice`, as practice draws from it.

    Args:
        config: the resolved settings.
        lm_of: gives the LM of a role.
    """
    policy = config.policy
    if practice:
        given = config.practice.sampling
        changes = {name: getattr(given, name) for name in given.model_fields_set}
        sampling = policy.sampling.model_copy(update=changes)
        policy = policy.model_copy(update={"sampling": sampling})
    return make_policy(policy, lm_of)


def configured_verifier(config: Config, lm_of: Callable[[RoleConfig], LM]) -> Verifier | None:
    """Return the verifier that the settings describe; a judge asks the judge's LM.

    None for the kind `none`, whose key `by` says who judges practice: `critic` or `majority`.

    Raises:
        ConfigError: an unknown kind or key.
    """
    if config.verifier.get("kind") == "none":
        check_unverified(config.verifier)
        return None

    asked = False

    def judge_lm(spec: str = "", **options: Any) -> LM:
        nonlocal asked
        asked = True
        judge = config.judge
        if spec:
            judge = judge.model_copy(update={"lm": spec, "options": options})
        return lm_of(judge)

    verifier = make_verifier(with_judge_role(config.verifier, config.judge), open_lm=judge_lm)
    if config.judge != JudgeConfig() and not asked:
        log.warning(
            "[judge] has no effect: verifier.kind is %r, which asks no model; leave the section "
            "out, or set verifier.kind = 'judge'",
            config.verifier.get("kind"),
        )
    return verifier


def check_unverified(verifier: Mapping[str, Any]) -> None:
    """Check the settings of the verifier kind `none`.

    Raises:
        ConfigError: an unknown key, or `by` is neither `critic` nor `majority`.
    """
    unknown = sorted(verifier.keys() - {"kind", "by"})
    by = verifier.get("by", "critic")
    if unknown or by not in ("critic", "majority"):
        raise ConfigError(
            f"verifier {dict(verifier)}: kind 'none' knows the key 'by', which is 'critic' or "
            "'majority'"
        )


def with_judge_role(verifier: Mapping[str, Any], role: RoleConfig) -> dict[str, Any]:
    """Return a verifier's settings with what the judge's role says and they do not: how it draws
    and how long a call may take, also in the parts of a weighted one."""
    found = dict(verifier)
    parts = found.get("parts")
    if isinstance(parts, Mapping):
        found["parts"] = {
            name: with_judge_role(part, role) if isinstance(part, Mapping) else part
            for name, part in parts.items()
        }
    if found.get("kind") != "judge":
        return found
    if role.sampling != SamplingConfig():
        drawn = {f.name: getattr(role.sampling.to_sampling(), f.name) for f in fields(Sampling)}
        drawn |= {"extra": dict(drawn["extra"]), "temperature": drawn["temperature"] or 0.0}
        found.setdefault("sampling", drawn)
    limits = {"timeout_s": role.timeout_s, "first_token_s": role.first_token_s}
    found.setdefault("limits", limits)
    return found


def make_policy(config: PolicyConfig, lm_of: Callable[[RoleConfig], LM]) -> Policy:
    """Return a chat, tool or function policy.

    Raises:
        ConfigError: `tools` or `function` does not name a Python function.
    """
    sampling, limits = config.sampling.to_sampling(), config.to_limits()
    if config.kind == "function":
        if not config.function:
            raise ConfigError("policy.kind is 'function': set policy.function to 'module:name'")
        return FunctionPolicy(
            _callable(config.function, "policy.function"), policy_id=f"function:{config.function}"
        )
    lm = lm_of(config)
    if config.kind == "tools":
        tools = [_as_tool(name) for name in config.tools]
        if not tools:
            raise ConfigError("policy.kind is 'tools': list at least one 'module:name' in tools")
        return ToolPolicy(
            lm,
            tools,
            system=config.system,
            sampling=sampling,
            limits=limits,
            loop=ToolLoop(max_steps=config.max_steps),
        )
    return ChatPolicy(lm, system=config.system, sampling=sampling, limits=limits)


def agent_text(config: PolicyConfig) -> str:
    """Return the agent's own instructions and tools as text, for a critic."""
    if config.kind != "tools":
        return config.system
    specs = [_as_tool(name).spec for name in config.tools]
    lines = [f"- {s.name}({canonical_json(s.parameters)}): {s.description}" for s in specs]
    return "\n".join([config.system, "Tools:", *lines]).strip()


def _as_tool(name: str) -> Tool:
    value = load_object(name, "policy.tools")
    return value if isinstance(value, Tool) else tool(_callable(name, "policy.tools"))


def _callable(name: str, where: str) -> Callable[..., Any]:
    value = load_object(name, where)
    if not callable(value):
        raise ConfigError(f"{where}: {name!r} is a {type(value).__name__}: a function is needed")
    return cast(Callable[..., Any], value)


def sampling_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return sampling settings without those left to the provider, for cards and reports."""
    return {key: value for key, value in values.items() if value not in (None, (), {}, False)}
