"""Settings of a training run: one frozen model, TOML, every mistake named.

Does not know how a setting is used, except which of them contradict each other.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

from pydantic import ValidationError

from tfgrpo.config.learn import BudgetConfig
from tfgrpo.config.sections import Section, explain, load_toml, wrong_verb
from tfgrpo.errors import ConfigError
from tfgrpo.hints.sections import Common
from tfgrpo.hints.settings import method_of
from tfgrpo.rl.config_sections import (
    CreditConfig,
    CurriculumConfig,
    EngineConfig,
    LossConfig,
    ModelConfig,
    MultiTurnConfig,
    OptimiserConfig,
    RewardsConfig,
    RolloutConfig,
    TrainRunConfig,
    TrainTasksConfig,
)
from tfgrpo.rl.formulas import requirements
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.registry import lookup
from tfgrpo.rl.strategy_options import (
    SEGMENTED,
    TURNS,
    TreeOptions,
    refuse_beside,
    strategy_options,
)


class TrainConfig(Section):
    """All settings of a training run."""

    model: ModelConfig = ModelConfig()
    tasks: TrainTasksConfig = TrainTasksConfig()
    verifier: dict[str, Any] = {"kind": "exact"}
    """What judges rollouts, by `kind` with its own keys (docs/verifiers.md)."""
    rollout: RolloutConfig = RolloutConfig()
    loss: LossConfig = LossConfig()
    rewards: RewardsConfig = RewardsConfig()
    credit: CreditConfig = CreditConfig()
    features: dict[str, str] = {}
    """Where further columns of the registries' entries come from, by name."""
    hints: dict[str, Any] = {}
    """`name` of a hint scheduler and its options; empty for none."""
    curriculum: CurriculumConfig = CurriculumConfig()
    multi_turn: MultiTurnConfig = MultiTurnConfig()
    engine: EngineConfig = EngineConfig()
    optimiser: OptimiserConfig = OptimiserConfig()
    run: TrainRunConfig = TrainRunConfig()
    budget: BudgetConfig = BudgetConfig()
    """Caps on what a judge's LM may use in the whole run."""
    prices: dict[str, dict[str, float]] = {}
    """Prices of judges by model id, in dollars per million tokens: input, output, cache_read,
    cache_write."""

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Check a nested mapping.

        Raises:
            ConfigError: naming each key, its value, what is allowed and the nearest known key.
        """
        try:
            config = cls.model_validate(values)
        except ValidationError as exc:
            told = wrong_verb(values, "train", source) + explain(exc, cls, source)
            raise ConfigError(told) from None
        config.check()
        return config

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `section.key=value` overrides; paths are relative to it.

        Raises:
            ConfigError: the file is absent, not TOML, or a key is wrong.
        """
        path = Path(path)
        values = load_toml(path, overrides)
        for key in ("path", "held_out", "groups"):
            given = values.get("tasks", {}).get(key)
            if isinstance(given, str) and given:
                values["tasks"][key] = str(path.parent / given)
        return cls.from_mapping(values, str(path))

    @property
    def formulas(self) -> requirements.FormulaChoice:
        """What is chosen from the registries, and what meets its needs."""
        played = self.multi_turn
        o = self.optimiser
        return requirements.FormulaChoice(
            loss=self.loss.name,
            names_loss=bool(self.loss.model_fields_set & {"name", "options"}),
            loss_options=self.loss.options,
            aggregation=self.loss.aggregation,
            advantage=self.loss.advantage,
            advantage_options=self.loss.advantage_options,
            names_advantage=bool(self.loss.model_fields_set & {"advantage", "advantage_options"}),
            rewards=self.rewards.names,
            reward_options=self.rewards.options,
            credit=self.credit.name,
            credit_options=self.credit.options,
            columns=self.features,
            verifier=str(self.verifier.get("kind", "")),
            has_verdicts=bool(self.verifier.get("verdicts")),
            temperature=self.rollout.temperature,
            is_multi_turn=played.is_on or bool(self.tasks.groups),
            has_environment=bool(played.environment),
            hints=str(self.hints.get("name", "")),
            has_phrases=bool(self.credit.phrases),
            has_separator=bool(self.credit.separator),
            segments=self.rollout.strategy if self.rollout.strategy in SEGMENTED else "",
            group_size=self.rollout.group_size,
            steps=o.steps,
            max_tokens=played.max_tokens if played.is_on else self.rollout.max_tokens,
            passes=o.epochs_per_batch,
            is_reused=o.epochs_per_batch * o.updates_per_epoch > 1
            or self.reuses
            or self.engine.max_staleness > 0,
        )

    @property
    def reuses(self) -> bool:
        """True where rollouts that older weights sampled may be trained on."""
        return self.curriculum.reuses or self.rollout.strategy == "april"

    def check(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        if self.credit.name and "advantage" in self.loss.model_fields_set:
            raise ConfigError(
                f"credit.name {self.credit.name!r} and loss.advantage {self.loss.advantage!r} both "
                "make the advantages: keep one of them"
            )
        requirements.check(self.formulas)
        if self.credit.separator and (self.multi_turn.is_on or self.formulas.segments):
            raise ConfigError(
                "credit.separator cuts replies of one turn into steps, and [multi_turn] or "
                "rollout.strategy gives steps already: leave one of them out"
            )
        self._check_sections()
        self._check_engine()
        if self.rollout.top_p < 1:
            raise ConfigError(
                f"rollout.top_p is {self.rollout.top_p}: a truncated draw comes from another "
                "distribution than the one trained, so probability ratios would be wrong; use 1"
            )
        if self.rollout.group_size == 1 and self.loss.advantage == "grpo":
            raise ConfigError(
                "rollout.group_size is 1: a group of one has no baseline; use 2 or more"
            )
        if self.optimiser.updates_per_epoch > self.rollout.tasks_per_step:
            raise ConfigError(
                f"optimiser.updates_per_epoch {self.optimiser.updates_per_epoch} is more than the "
                f"{self.rollout.tasks_per_step} groups of a step; groups are never split"
            )

    def _check_sections(self) -> None:
        c = self.curriculum
        low, high = c.band
        if not 0 <= low <= high <= 1:
            raise ConfigError(
                f"curriculum.band is {list(c.band)}; give two shares, 0 ≤ low ≤ high ≤ 1"
            )
        if c.order == "easy_first" and not c.profile:
            raise ConfigError(
                "curriculum.order 'easy_first' needs curriculum.profile, draws a task"
            )
        if c.candidates == "all" and not c.allocate:
            raise ConfigError("curriculum.candidates 'all' needs curriculum.allocate")
        if c.select_options and not c.select:
            raise ConfigError(
                f"curriculum.select_options has {sorted(c.select_options)}, and curriculum.select "
                "is empty: name a rule or leave them out"
            )
        self._check_reuse()
        if self.multi_turn.calls == "native" and self.model.template != "chat":
            raise ConfigError("multi_turn.calls 'native' needs model.template 'chat'")
        if self.multi_turn.tools and self.multi_turn.environment:
            raise ConfigError(
                "multi_turn.tools and multi_turn.environment are both set: an environment answers "
                "every turn "
                "itself, so keep one of them"
            )
        if self.hints:
            self._check_hints(method_of(self.hints))
        if self.tasks.groups:
            self._check_saved()
        self._check_strategy()

    def _check_reuse(self) -> None:
        """Refuse old rollouts where their ratio could not be right."""
        c = self.curriculum
        names = [f"curriculum.{n}" for n in ("replay", "refill", "select") if getattr(c, n)]
        if self.rollout.strategy == "april":
            names.append("rollout.strategy 'april'")
        if self.engine.max_staleness:
            names.append("engine.max_staleness")
        if not names:
            return
        if "ratio" not in lookup(LOSSES, "loss", self.loss.name).needs:
            raise ConfigError(
                f"{names[0]} with loss {self.loss.name!r}: that loss has no ratio to the "
                "weights that sampled, so old rollouts would give a wrong gradient; use clip, "
                "cispo or another loss with a ratio"
            )
        if self.rollout.temperature != 1.0:
            raise ConfigError(
                f"{names[0]} with rollout.temperature {self.rollout.temperature}: samplers "
                "tell log-probs at temperature 1 only, which old rollouts are weighed by; use 1"
            )

    def _check_engine(self) -> None:
        """Refuse settings of the engine that contradict each other or the rest."""
        e, strategy = self.engine, self.rollout.strategy
        _check_engine_options(e.options)
        for name in ("max_staleness", "base_urls"):
            if getattr(e, name) and e.kind != "vllm-server":
                raise ConfigError(
                    f"engine.{name} with engine.kind {e.kind!r}: it is for servers beside the "
                    f"trainer; set engine.kind = 'vllm-server' or leave engine.{name} out"
                )
        if e.base_urls and "base_url" in e.model_fields_set:
            raise ConfigError("engine.base_url and engine.base_urls are both set: keep one of them")
        if len(set(e.base_urls)) < len(e.base_urls):
            raise ConfigError("engine.base_urls names a server twice: name each once")
        if e.max_staleness and strategy not in ("plain", *TURNS):
            raise ConfigError(
                f"engine.max_staleness with rollout.strategy {strategy!r}: it looks at the "
                "trained weights, which move while the next step is sampled; set "
                "engine.max_staleness = 0 or rollout.strategy = 'plain'"
            )

    def _check_saved(self) -> None:
        """Refuse saved groups together with what needs sampling."""
        c, r = self.curriculum, self.rollout
        clashes = {
            "tasks.path": bool(self.tasks.path),
            "[hints]": bool(self.hints),
            "curriculum.profile": bool(c.profile),
            "curriculum.allocate": bool(c.allocate),
            f"rollout.strategy {r.strategy!r}": r.strategy != "plain",
            f"loss.advantage {self.loss.advantage!r}": self.loss.advantage == "remax",
            "engine.max_staleness": bool(self.engine.max_staleness),
        } | {f"curriculum.{n}": bool(getattr(c, n)) for n in ("replay", "refill", "select")}
        for name, is_set in clashes.items():
            if is_set:
                raise ConfigError(
                    f"tasks.groups with {name}: saved groups are trained as they are, and that "
                    "needs rollouts of the weights; leave one of them out"
                )

    def _check_strategy(self) -> None:
        """Refuse a strategy that other settings contradict."""
        r, c = self.rollout, self.curriculum
        options = strategy_options(r.strategy, r.strategy_options)
        if options is None:
            return
        if isinstance(options, TreeOptions):
            options.check(r.group_size)
        told = f"rollout.strategy {r.strategy!r}"
        if (r.strategy in TURNS) != self.multi_turn.is_on:
            raise ConfigError(
                f"{told} is for rollouts of several turns: set [multi_turn]"
                if r.strategy in TURNS
                else f"{told} with [multi_turn]: it is for replies of one turn; take 'arpo' or "
                "'turn_tree', or leave one of them out"
            )
        clashes = {"[hints]": bool(self.hints), "curriculum.allocate": bool(c.allocate)}
        if r.strategy == "april":
            clashes |= {
                "curriculum.max_resample_rounds above 1": c.max_resample_rounds > 1,
                f"engine.kind {self.engine.kind!r}": self.engine.kind != "own",
            }
        refuse_beside(told, clashes)

    def _check_hints(self, method: Common) -> None:
        if self.multi_turn.is_on and method.forces_prefix:
            raise ConfigError(
                f"[hints] name {method.name!r} with [multi_turn]: it forces the start of a reply, "
                "which rollouts of several turns cannot be given; leave one of the sections out"
            )
        if method.advantage and self.loss.advantage != method.advantage:
            raise ConfigError(
                f"[hints] name {method.name!r} is defined with the advantage "
                f"{method.advantage!r}, and loss.advantage is {self.loss.advantage!r}: set "
                f"loss.advantage = {method.advantage!r}"
            )
        needs = lookup(LOSSES, "loss", self.loss.name).needs
        if method.adds_rows and "group" in needs:
            raise ConfigError(
                f"[hints] name {method.name!r} trains good rollouts once more under the bare "
                f"prompt, which loss {self.loss.name!r} would compare with their group: set "
                "hints.distil = 0 or use clip or another loss of a rollout alone"
            )
        if not method.needs_ratio:
            return
        if "ratio" not in needs:
            raise ConfigError(
                f"[hints] name {method.name!r} trains rollouts under another prompt than their "
                f"own, by the ratio to how they were sampled, which loss {self.loss.name!r} does "
                "not have; use clip or another loss with a ratio"
            )
        if self.rollout.temperature != 1.0:
            raise ConfigError(
                f"[hints] name {method.name!r} with rollout.temperature "
                f"{self.rollout.temperature}: samplers tell log-probs at temperature 1 only, which "
                "these rollouts are weighed by; use 1"
            )

    def to_json(self) -> dict[str, Any]:
        """Return the resolved settings as JSON."""
        values: dict[str, Any] = json.loads(self.model_dump_json())
        return values


def _check_engine_options(options: dict[str, Any]) -> None:
    """Refuse engine options that let a model's own code run or read pickles.

    Raises:
        ConfigError: names the option.
    """
    if options.get("trust_remote_code"):
        raise ConfigError("engine.options.trust_remote_code would run a model's own code: leave it")
    if options.get("load_format", "auto") not in ("auto", "safetensors", "dummy"):
        raise ConfigError(
            f"engine.options.load_format is {options['load_format']!r}; weights are read from "
            "safetensors only: leave it out"
        )
