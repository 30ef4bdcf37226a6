"""The training loop: tasks → groups → advantages → packed update → weights.

One step reads from top to bottom in `Trainer.step`. All randomness comes from counters (seed,
step, task, sample), so the state of a run is its step number, the optimiser's tensors and the JSON
of hints, curriculum and replay; a resumed run is bit-equal to an uninterrupted one.

Does not know how tokens are made or packed. Sources: GRPO (arXiv 2402.03300) for the loop; what
differs elsewhere is named in the registries.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Protocol

from tfgrpo.errors import ConfigError, VerifierError
from tfgrpo.protocols import (
    Allocator,
    Generator,
    HintScheduler,
    Verifier,
)
from tfgrpo.rl import distributed, run_state
from tfgrpo.rl.checkpoints.hub import Origin, origin_of
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel, check_asked, load_parts, write_model
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.requirements import needs_of, remarks
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.guards import (
    Determinism,
    FlatSteps,
    check_parts,
    check_tasks,
    explain_out_of_memory,
)
from tfgrpo.rl.monitoring.held_out import HeldOutLog, sample_row
from tfgrpo.rl.monitoring.metrics import (
    MetricsLog,
    Sink,
    group_figures,
    rollout_figures,
    update_figures,
)
from tfgrpo.rl.monitoring.roofline import budget_figures, measure_roofline
from tfgrpo.rl.optim.lora import LoraWeights
from tfgrpo.rl.rollouts.ahead import RollsAhead
from tfgrpo.rl.rollouts.curriculum import Curriculum
from tfgrpo.rl.rollouts.factory import (
    CountingGenerator,
    maker_of,
    own_generator,
    prompter_of,
    train_sampling,
)
from tfgrpo.rl.rollouts.recompose import Recompose, RecomposeOptions
from tfgrpo.rl.rollouts.replay_buffer import Replay
from tfgrpo.rl.rollouts.step_groups import StepGroups, StepSampler
from tfgrpo.rl.rollouts.step_parts import MakeGroups, StepParts
from tfgrpo.rl.strategies.maker import Sight
from tfgrpo.rl.strategies.settings import makers_of, turns_of
from tfgrpo.rl.strategy_options import strategy_options
from tfgrpo.rl.update.accumulate import TrainRow
from tfgrpo.rl.update.engine_check import check_engine
from tfgrpo.rl.update.formula_state import FormulaState
from tfgrpo.rl.update.given_rows import References
from tfgrpo.rl.update.hint_reliance import hint_reliance
from tfgrpo.rl.update.train_rows import RowMaker
from tfgrpo.rl.update.updater import Updater, UpdateReport
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.canonical import derive_seed, digest

__all__ = ["LoadedModel", "StepReport", "Trainer", "TrainerParts", "load_parts"]


log = logging.getLogger(__name__)

_UPDATE_ROOM = (
    "optimiser.micro_batch_tokens, optimiser.vocabulary_chunk or rollout.max_rows, or set "
    "model.checkpoint_activations = true or optimiser.moments = 'bfloat16'"
)


@dataclass(slots=True)
class StepReport:
    """What a step did: figures for the log."""

    step: int
    figures: dict[str, Any] = field(default_factory=dict)
    groups: list[RolloutGroup] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class TrainerParts:
    """What takes the place of a trainer's own parts."""

    generator: Generator | None = None
    """Another maker of tokens (vLLM); None samples from the trained weights directly."""
    sampler: GroupGenerator | None = None
    """What samples from them, over the same decoder, such as an earlier trainer's `generator`,
    whose graphs and cache are used again; None makes one."""
    make_groups: MakeGroups | None = None
    """Another maker of groups, such as an agent loop."""
    allocate: Allocator | None = None
    """How many rollouts each task gets."""
    sinks: Mapping[str, Sink] = field(default_factory=dict)
    """Further receivers of metrics."""


class Store(Protocol):
    """What keeps rollouts from step to step."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state as JSON."""
        ...

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        ...


class Trainer:
    """Trains one model.

    Args:
        config: all settings.
        model: weights and tokenizer.
        tasks: training tasks.
        verifier: what judges replies.
        held_out: evaluation tasks, asked without hints.
        hints: when a failed task gets which hint.
        parts: what takes the place of the trainer's own parts.
    """

    def __init__(
        self,
        config: TrainConfig,
        model: LoadedModel,
        tasks: Sequence[Task],
        verifier: Verifier,
        *,
        held_out: Sequence[Task] = (),
        hints: HintScheduler | None = None,
        parts: TrainerParts | None = None,
    ) -> None:
        parts = parts or TrainerParts()
        check_tasks(tasks, held_out, verifier, config)
        own_groups = parts.make_groups is not None
        check_parts(config, verifier, hints, parts.allocate, has_own_groups=own_groups)
        check_asked(model, dtype=config.model.dtype, device=config.model.device)
        for remark in remarks(config.formulas) if not distributed.world()[0] else ():
            log.warning("%s", remark)
        self.config = config
        self.step_number = 0
        self._skipped = 0
        self._flat = FlatSteps()
        self._model = model
        self._tasks = list(tasks)
        self._held_out = list(held_out)
        options = strategy_options(config.rollout.strategy, config.rollout.strategy_options)
        hints = hints or turns_of(options, model.decoder.shape.vocab, config.run.seed)
        self._hints = hints
        self._rank, self._world = distributed.world()
        c, r, run = config.curriculum, config.rollout, config.run
        self._folder = Path(run.folder)
        knows = bool({"extra:prior_R", "extra:past_share_R"} & needs_of(config.formulas))
        self.curriculum = Curriculum(
            c,
            tasks,
            tasks_per_step=r.tasks_per_step,
            group_size=r.group_size,
            seed=run.seed,
            allocate=parts.allocate,
            remembers=knows,
        )
        keeps = c.replay > 0 or c.refill > 0
        recompose = Recompose(RecomposeOptions.of(c.select_options)) if c.select else None
        replay = Replay(keep=c.replay_keep, age=c.replay_age, seed=run.seed) if keeps else None
        self._state = FormulaState()
        self.updater = Updater(config, model.decoder, parts.generator, self._state)
        self.optimiser = self.updater.optimiser
        self.generator = parts.sampler or own_generator(config, model, self.updater.weights.spare())
        self._counted = CountingGenerator(self.generator)
        self._reward_range = verifier.reward_range
        self._maker = maker_of(config, model, verifier, self._counted, parts.generator)
        self._prompter = prompter_of(config, model)
        read, window = self._prompter.prefix_ids, self._prompter.context_tokens
        given = References(read, model.eos_ids[:1], self._reward_range[1], window)
        imitates = "given" in LOSSES[config.loss.name].needs
        self._row_maker = RowMaker(
            config, model.decoder, model.text_of, self._state, given if imitates else None
        )
        grower, partial = makers_of(
            options, self._maker, self._sight(), is_foreign=parts.generator is not None
        )
        self._roller = StepSampler(
            config,
            self._maker,
            self.curriculum,
            StepParts(
                replay,
                hints,
                parts.make_groups,
                grower,
                partial,
                recompose,
                knows=knows,
                greedy="baseline" in self._row_maker.needs,
            ),
        )
        self._engine = parts.generator
        self._rolls = RollsAhead(
            config, self._roller, self._maker, parts.generator, has_own_groups=own_groups
        )
        self._stores: dict[str, Store | None] = {
            "replay": replay,
            "partial": partial,
            "recompose": recompose,
            "ahead": self._rolls,
        }
        self._sinks = parts.sinks
        self._log: MetricsLog | None = None
        self._samples: MetricsLog | None = None
        self._has_told_size = False
        asked = [[t.to_dict() for t in held_out], run.evaluate_draws, run.evaluate_temperature]
        self._scores = HeldOutLog(
            self._folder / "evaluations.jsonl", digest(asked, 16), writes=self._rank == 0
        )

    def _sight(self) -> Sight:
        """How a strategy looks at distributions."""
        o, rollout = self.config.optimiser, self.config.rollout
        eos_ids = () if rollout.ignore_eos else tuple(self._model.eos_ids)
        decoder = self._model.decoder
        return Sight(
            decoder, rollout.temperature, eos_ids, o.micro_batch_tokens, o.vocabulary_chunk
        )

    def train(self, on_step: Callable[[StepReport], None] | None = None) -> dict[str, Any]:
        """Run to the last step, resuming the newest checkpoint of the run folder.

        Returns the last held-out evaluation with the one before training, or an empty record
        without held-out tasks. A run that has ended is not evaluated again.

        Raises:
            ConfigError: settings, a mismatch of log-probs, memory.
            VerifierError: nothing of a whole step could be graded.
            StoreError: a checkpoint cannot be written or read.
        """
        self.resume()
        self.updater.sync()
        last: dict[str, Any] = {}
        total = self.config.optimiser.steps
        if self._held_out and self.config.run.evaluate_before and not self.step_number:
            self._evaluated()
        while self.step_number < total:
            report = self.step()
            every = self.config.run.evaluate_every
            if self._held_out and every and self.step_number % every == 0:
                last = self._evaluated()
                numbers = {k: v for k, v in last.items() if not isinstance(v, dict)}
                report.figures |= {f"held_out_{k}": v for k, v in numbers.items()}
            self._write(report)
            if on_step is not None:
                on_step(report)
            if self.step_number % self.config.run.save_every == 0 or self.step_number == total:
                self.save()
        if self._held_out and not last:
            last = self._evaluated()
        return last

    def _evaluated(self) -> dict[str, Any]:
        """What this step is worth, from the file where it was scored before."""
        return self._scores.of_step(self.step_number) or self.evaluate()

    def step(self) -> StepReport:
        """Make groups, update the weights once a batch, and return the figures."""
        weight = self._model.decoder.embed
        roofline = measure_roofline(weight.device, weight.dtype)
        started = time.monotonic()
        number = self.step_number
        with explain_out_of_memory(number + 1, "rollout.max_rows or rollout.max_tokens"):
            taken = self._rolls.take(number)
        rolled, made = taken.groups, time.monotonic()
        waited = self._rolls.waited_s
        with (
            self._rolls.beside(number + 1),
            explain_out_of_memory(number + 1, _UPDATE_ROOM),
            Determinism(self.config.run.deterministic),
        ):
            leaning = {} if self._hints is None else self._reliance(rolled.made)
            rows, done = self._update(rolled, number)
        if done.norms:
            self._moved(rows, done, number)
        self.step_number += 1
        ended = time.monotonic()
        n_rollouts = sum(len(g.rollouts) for g in rolled.made)
        loss = self.config.loss
        figures = group_figures(rolled.made) | rolled.figures | leaning
        figures |= {"rows": len(rows), "skipped_steps": self._skipped} | self._state.figures()
        sampled = self._counted.take()
        figures |= rollout_figures(taken.spent, sampled, self._hints)
        figures |= update_figures(done, with_entropy=loss.log_entropy or loss.entropy != 0)
        figures |= {
            "seconds": ended - started,
            "rollout_seconds": taken.seconds,
            "update_seconds": ended - made - (self._rolls.waited_s - waited),
            "samples_per_s": n_rollouts * self._world / (ended - started),
        }
        if self._rolls.is_on:
            figures["waited_seconds"] = self._rolls.waited_s
        figures |= budget_figures(self._model.decoder, roofline, sampled, figures)
        is_flat = rolled.is_graded and not figures["grad_norm"]
        self._flat.count(self.step_number, figures, is_flat=is_flat, tells=not self._rank)
        return StepReport(number + 1, figures, rolled.groups)

    def _moved(self, rows: Sequence[TrainRow], done: UpdateReport, number: int) -> None:
        """Count an update; where the engine sampled meanwhile, hand it the weights and check it."""
        self._rolls.weights += 1
        if self._rolls.is_on and self._engine is not None:
            self.updater.sync()
            checked = check_engine(self._engine, self.updater, self.config, rows, number)
            done.mismatch = checked or done.mismatch

    def _update(self, rolled: StepGroups, number: int) -> tuple[list[TrainRow], UpdateReport]:
        """Train on a step's groups; a step whose every reply is cut is skipped and counted.

        Raises:
            ConfigError: too many steps in a row were skipped.
        """
        if rolled.is_graded:
            self._skipped = 0
            rows, stale = self._row_maker.rows(
                rolled.groups, number, baselines=rolled.baselines, replayed=rolled.replayed
            )
            return rows, self.updater.update(rows, number, stale)
        self._skipped += 1
        rollout = self.config.rollout
        told = (
            f"step {number + 1}: 100 % of the replies were cut at rollout.max_tokens "
            f"{rollout.max_tokens}, so nothing is trained ({self._skipped} in a row); raise it, "
            "which a resumed run may do, or set rollout.on_truncated = 'grade'"
        )
        if self._skipped >= rollout.max_skipped_steps:
            raise ConfigError(told)
        if not self._rank:
            log.warning("%s", told)
        return [], UpdateReport()

    def evaluate(self) -> dict[str, Any]:
        """Ask the held-out tasks without hints; mean reward with an interval over tasks, and the
        change since before training where that was scored."""
        run = self.config.run
        sampling = replace(train_sampling(self.config), temperature=run.evaluate_temperature)
        mine = self._held_out[self._rank :: self._world]
        of_step = self._maker.figures
        groups = self._maker.make(
            mine,
            run.evaluate_draws,
            seed=derive_seed(run.seed, "held out"),
            sampling=sampling,
        )
        self._counted.take()  # no part of a step
        self._maker.figures = of_step
        scores: dict[str, list[float]] = {}
        for part in distributed.gather_objects(
            {g.task.task_id: list(g.rewards_G) for g in groups if g.rewards_G}
        ):
            scores |= part
        if not scores:
            raise VerifierError(f"none of {len(self._held_out)} held-out tasks could be graded")
        return self._scores.add(self.step_number, scores, self._reward_range)

    def _reliance(self, groups: Sequence[RolloutGroup]) -> dict[str, float]:
        found = hint_reliance(
            groups,
            self._model.decoder,
            self._prompter.encode,
            max_tokens=self.config.optimiser.micro_batch_tokens,
            chunk=self.config.optimiser.vocabulary_chunk,
        )
        return {} if found is None else {"hints_reliance": found}

    def _write(self, report: StepReport) -> None:
        if self._rank:
            return
        done, run = self.step_number - 1, self.config.run
        if self._log is None:
            self._log = MetricsLog(self._folder / "metrics.jsonl", done, self._sinks)
            self._samples = MetricsLog(self._folder / "samples.jsonl", done, {})
        self._log.write(report.step, report.figures)
        if self._samples is not None:
            groups = sample_row(report.groups, run.keep_samples)
            self._samples.write(
                report.step, {"groups": groups, "of_steps": self.config.optimiser.steps}
            )

    def save(self) -> Path:
        """Write a checkpoint of this step and return its folder.

        Raises:
            StoreError: the disk refuses; earlier checkpoints are whole.
        """
        state = {
            "identity": run_state.identity_of(self.config, self._tasks),
            "hints": self._hints.state_dict() if self._hints is not None else {},
            "formulas": self._state.state_dict(),
            "skipped": self._skipped,
            "curriculum": self.curriculum.state_dict(),
            **{name: part.state_dict() for name, part in self._stores.items() if part is not None},
            "config": self.config.to_json(),
        }
        kept = run_state.save(
            self._folder / "checkpoints",
            self.step_number,
            self.optimiser,
            state,
            self.export,
            keep=self.config.run.keep,
            moments=self.config.run.save_optimiser,
        )
        if not self._rank and not self._has_told_size:
            self._has_told_size = True
            size = sum(f.stat().st_size for f in kept.rglob("*") if f.is_file())
            log.info(
                "a checkpoint takes %.1f MB, and %d are kept; run.save_optimiser = false leaves "
                "the optimiser's state out", size / 1e6, self.config.run.keep,
            )  # fmt: skip
        return kept

    @property
    def origin(self) -> Origin:
        """The model that training started from, as the hub names it."""
        given = self.config.model
        return origin_of(self._model.name, hub_id=given.hub_id, licence=given.licence)

    def export(self, folder: Path) -> None:
        """Write the model (and adapters) in Hugging Face form into an existing folder."""
        if isinstance(self.updater.weights, LoraWeights):
            from tfgrpo.rl.checkpoints.export import write_adapters

            write_adapters(folder, self.updater.weights, self.origin.hub_id or self._model.name)
        write_model(folder, self._model)

    def resume(self) -> bool:
        """Load the newest checkpoint of the run folder, if there is one.

        Raises:
            StoreError: it is damaged, or of a run with other settings.
        """
        state = run_state.load(
            self._folder / "checkpoints",
            run_state.identity_of(self.config, self._tasks),
            self._model.decoder,
            self.optimiser,
        )
        if state is None:
            return False
        if self._hints is not None:
            self._hints.load_state_dict(state["hints"])
        self._state.load_state_dict(state["formulas"])
        self._skipped = int(state["skipped"])
        self.curriculum.load_state_dict(state["curriculum"])
        for name, part in self._stores.items():
            if part is not None and (name in state or name != "ahead"):  # older runs have none
                part.load_state_dict(state[name])
        self.step_number = int(state["step"])
        return True
