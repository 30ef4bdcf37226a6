"""From the `[nudge]` section to a method and what rolls it.

Does not know how a method works. Source: own.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tfgrpo.config.learn import Config, RoleConfig
from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.errors import ConfigError, boundary
from tfgrpo.experience.critic.asker import Asker
from tfgrpo.experience.settings import ExperienceSettings
from tfgrpo.nudges.drafts import Drafts
from tfgrpo.nudges.examples import Examples
from tfgrpo.nudges.from_scheduler import Scheduled
from tfgrpo.nudges.hints import Hints, check_hints
from tfgrpo.nudges.method import NudgeMethod
from tfgrpo.nudges.perturbation import Perturb
from tfgrpo.nudges.rounds import Nudger
from tfgrpo.nudges.strategies import Strategies
from tfgrpo.nudges.writing import TextWriter
from tfgrpo.protocols import LM, HintScheduler
from tfgrpo.rollout import Task
from tfgrpo.runtime.import_string import load_object
from tfgrpo.runtime.token_estimates import estimate_tokens
from tfgrpo.sampling import Sampler


def make_nudger(
    config: Config,
    settings: ExperienceSettings,
    sampler: Sampler,
    lm_of: Callable[[RoleConfig], LM],
    scheduler: HintScheduler | None = None,
) -> Nudger | None:
    """Return what gives failed tasks another try, or None where that is off.

    Raises:
        ConfigError: like `make_method`.
    """
    nudge, learn = config.nudge, config.learn
    if nudge.kind == "off":
        return None
    role = config.policy if nudge.writer == "policy" else config.critic
    method = make_method(nudge, settings, learn.group_size, lambda: lm_of(role), scheduler)
    return Nudger(nudge, method, sampler, learn.group_size, learn.seed)


def make_method(
    config: NudgeConfig,
    settings: ExperienceSettings,
    group_size: int,
    writer_lm: Callable[[], LM],
    scheduler: HintScheduler | None = None,
) -> NudgeMethod:
    """Return the method that the settings name.

    Args:
        config: the section.
        settings: how an LM that writes texts is asked, and the run's seed.
        group_size: rollouts a group.
        writer_lm: opens that LM; called only where it is needed.
        scheduler: for kind `scheduler`.

    Raises:
        ConfigError: kind `off`, or `scheduler` without one.
    """
    writer = None
    if config.asks_lm:
        asker = Asker(writer_lm(), settings, estimate_tokens)
        writer = TextWriter(asker, settings.seed)
    match config.kind:
        case "hints":
            return Hints(config, writer)
        case "strategies":
            return Strategies(config, group_size, writer)
        case "drafts":
            return Drafts(config, settings.seed)
        case "perturb":
            return Perturb(config, group_size, settings.seed)
        case "examples":
            return Examples(config)
        case "scheduler" if scheduler is not None:
            return Scheduled(config, scheduler, group_size)
        case "scheduler":
            raise ConfigError(
                "nudge.kind is 'scheduler': name one in nudge.scheduler as 'module:name', or give "
                "learn(..., scheduler=...)"
            )
        case _:
            raise ConfigError(f"nudge.kind is {config.kind!r}: there is no method to make")


def check_nudge(config: NudgeConfig, practice: Sequence[Task], *, from_traces: bool) -> None:
    """Check before anything is spent.

    Raises:
        ConfigError: nudging with saved traces, or hints without a text to give.
    """
    if config.kind == "off":
        return
    if from_traces:
        raise ConfigError(
            f"nudge.kind is {config.kind!r} and tasks.traces is set: saved groups are not rolled "
            "again; leave out one of them"
        )
    if config.kind == "hints":
        check_hints(config, practice)


def with_scheduler(config: Config, scheduler: HintScheduler | None) -> Config:
    """Return the settings with nudging by a given scheduler, where there is one.

    Raises:
        ConfigError: the settings name another kind.
    """
    if scheduler is None or config.nudge.kind == "scheduler":
        return config
    if config.nudge.kind != "off":
        raise ConfigError(
            f"a scheduler is given and nudge.kind is {config.nudge.kind!r}: leave out one of them"
        )
    nudge = config.nudge.model_copy(update={"kind": "scheduler"})
    return config.model_copy(update={"nudge": nudge})


def named_scheduler(config: NudgeConfig) -> HintScheduler | None:
    """Return a fresh scheduler of the name in the settings, or None where there is no name.

    Raises:
        ConfigError: nothing of that name, or no scheduler.
    """
    if config.kind != "scheduler" or not config.scheduler:
        return None
    value = load_object(config.scheduler, "nudge.scheduler")
    with boundary(ConfigError, f"nudge.scheduler {config.scheduler!r}"):
        made = value if hasattr(value, "after") and not isinstance(value, type) else value()
    if not all(callable(getattr(made, name, None)) for name in ("start", "after", "accept")):
        raise ConfigError(
            f"nudge.scheduler {config.scheduler!r} is a {type(made).__name__} without start, after "
            "and accept: name a hint scheduler or a function that makes one"
        )
    scheduler: HintScheduler = made
    return scheduler
