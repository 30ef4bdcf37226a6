"""A rehearsal: opens what a run will open and checks what it will check; asks no model.

What a run would refuse in its first second is refused here, with the same error. Only a key that is
not set is a remark instead: a forecast is of use before there is one. Does not know how figures are
made. Source: own.
"""

from __future__ import annotations

from collections.abc import Sequence

from tfgrpo.config.learn import Config, RoleConfig
from tfgrpo.errors import ProviderError
from tfgrpo.execute.judging import refuse_group_verifier
from tfgrpo.learning.components import OpenLM, configured_verifier, lm_name, make_policy, open_role
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import LM, Policy, Verifier
from tfgrpo.rollout import Task

__all__ = ["rehearse"]


class _Roles:
    """Opens each role's LM once; a role without a key gets a stand-in that is never asked."""

    def __init__(self, config: Config, opener: OpenLM) -> None:
        self._config = config
        self._opener = opener
        self._opened: dict[str, LM] = {}
        self.remarks: list[str] = []

    def lm(self, role: RoleConfig) -> LM:
        name = lm_name(self._config, role)
        if name not in self._opened:
            try:
                self._opened[name] = open_role(self._config, role, self._opener)
            except ProviderError as exc:
                remark = f"the run will stop at once: {exc}"
                self.remarks += [] if remark in self.remarks else [remark]
                return ScriptedLM("", model_id=role.lm or self._config.policy.lm)
        return self._opened[name]

    async def aclose(self) -> None:
        for lm in self._opened.values():
            await lm.aclose()


async def rehearse(
    config: Config,
    tasks: Sequence[Task],
    opener: OpenLM,
    *,
    policy: Policy | None = None,
    verifier: Verifier | None = None,
) -> list[str]:
    """Open policy, critic, judge and verifier and check every reference; return remarks.

    Args:
        config: the settings.
        tasks: all tasks that will be judged.
        opener: how a spec becomes an LM.
        policy, verifier: what the caller gives in place of the configured ones.

    Raises:
        ConfigError, MissingExtraError: what the run would raise before its first call.
    """
    roles = _Roles(config, opener)
    try:
        if policy is None:
            make_policy(config.policy, roles.lm)
        if config.learn.entries != "exemplars":
            roles.lm(config.critic)
        judge = verifier or configured_verifier(config, roles.lm)
        if judge is not None:
            refuse_group_verifier(judge, "learning")
            for task in tasks:
                judge.check_task(task)
    finally:
        await roles.aclose()
    return roles.remarks
