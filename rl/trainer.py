"""The training loop: tasks → groups → advantages → packed update → weights.

One step reads from top to bottom in `Trainer.step`. All randomness comes from counters (seed,
step, task, sample), so the state of a run is its step number, the optimiser's tensors and the hint
scheduler's JSON; a resumed run is bit-equal to an uninterrupted one.

Does not know how tokens are made or packed. Sources: GRPO (arXiv 2402.03300) for the loop; what
differs elsewhere is named in the registries.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import torch

from tfgrpo.canonical import derive_seed, digest
from tfgrpo.errors import ConfigError, StoreError, TfgrpoError, VerifierError
from tfgrpo.protocols import Generator, HintScheduler, Sampling, Verifier
from tfgrpo.rl import checkpoint, distributed
from tfgrpo.rl.advantages import ADVANTAGES
from tfgrpo.rl.batch import RewardBatch
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.engines import MismatchLimits, check_mismatch, measure_mismatch
from tfgrpo.rl.generator import GroupGenerator
from tfgrpo.rl.lora import TARGETS, LoraWeights
from tfgrpo.rl.metrics import MetricsLog, Sink, training_tflop
from tfgrpo.rl.model import Decoder, hf_views, load_hf_weights
from tfgrpo.rl.multi_turn import row_of
from tfgrpo.rl.optimiser import AdamSettings, AdamW, FullWeights, Weights, learning_rate
from tfgrpo.rl.registry import lookup
from tfgrpo.rl.rollouts import Prompter, RolloutMaker
from tfgrpo.rl.update import (
    TrainRow,
    UpdateResult,
    UpdateSettings,
    accumulate,
    score_rows,
    token_weights,
)
from tfgrpo.rollout import RolloutGroup, Task

MakeGroups = Callable[[Sequence[Task], int], list[RolloutGroup]]
"""(tasks of a step, seed) to one group a task, with token ids: a user's own rollouts."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What a trainer works on, loaded."""

    decoder: Decoder
    """The weights that run (and, with one process, are trained)."""
    tokenizer: Any
    save_extras: Callable[[Path], None]
    """Writes the model's config and tokenizer into a folder."""
    eos_ids: tuple[int, ...]
    name: str


@dataclass(slots=True)
class StepReport:
    """What a step did: figures for the log."""

    step: int
    figures: dict[str, Any] = field(default_factory=dict)
    groups: list[RolloutGroup] = field(default_factory=list)


class Trainer:
    """Trains one model.

    Args:
        config: all settings.
        parts: model and tokenizer.
        tasks: training tasks.
        verifier: what judges replies.
        held_out: evaluation tasks, asked without hints.
        hints: when a failed task gets which hint.
        generator: another maker of tokens (vLLM); None samples from the trained weights directly.
        make_groups: another maker of groups, such as a multi-turn agent loop.
        sinks: further receivers of metrics.
    """

    def __init__(
        self,
        config: TrainConfig,
        parts: Parts,
        tasks: Sequence[Task],
        verifier: Verifier,
        *,
        held_out: Sequence[Task] = (),
        hints: HintScheduler | None = None,
        generator: Generator | None = None,
        make_groups: MakeGroups | None = None,
        sinks: Mapping[str, Sink] | None = None,
    ) -> None:
        _check_tasks(tasks, held_out, verifier, config)
        self.config = config
        self.step_number = 0
        self._parts = parts
        self._tasks = list(tasks)
        self._held_out = list(held_out)
        self._hints = hints
        self._rank, self._world = distributed.world()
        if hints is not None and self._world > 1:
            raise ConfigError(
                f"[hints] with {self._world} processes: the state of a task's hints is kept by one "
                "process; train on one, or leave the section out"
            )
        self._folder = Path(config.run.folder)
        self._model = self._trained_model()
        self._weights = self._make_weights()
        o = config.optimiser
        self.optimiser = AdamW(
            self._weights,
            AdamSettings(o.lr, o.beta1, o.beta2, weight_decay=o.weight_decay, max_norm=o.max_norm),
        )
        self._reference = _frozen_copy(self._model) if config.loss.kl else None
        r = config.rollout
        self._engine = generator
        own = GroupGenerator(
            parts.decoder,
            eos_ids=parts.eos_ids,
            detokenize=lambda ids: str(parts.tokenizer.decode(list(ids))),
            max_rows=r.max_rows,
            poll_steps=r.poll_steps,
            fixed_rows=r.fixed_rows,
        )
        self.generator = own
        extra = {"ignore_eos": True} if r.ignore_eos else {}
        self._sampling = Sampling(
            temperature=r.temperature, max_tokens=r.max_tokens, stop=r.stop, extra=extra
        )
        self._maker = RolloutMaker(
            own if generator is None else _Batches(generator),
            Prompter(
                parts.tokenizer,
                system=config.model.system,
                template=config.model.template,
                context_tokens=parts.decoder.shape.context,
            ),
            verifier,
            self._sampling,
            policy_id=f"train:{parts.name}",
            on_truncated=r.on_truncated,
            verifier_timeout_s=r.verifier_timeout_s,
        )
        self._make_groups = make_groups
        self._sinks = sinks or {}
        self._log: MetricsLog | None = None

    def train(self, on_step: Callable[[StepReport], None] | None = None) -> dict[str, Any]:
        """Run to the last step, resuming the newest checkpoint of the run folder.

        Returns the last held-out evaluation, or an empty record without held-out tasks.

        Raises:
            ConfigError: settings, a mismatch of log-probs, memory.
            VerifierError: nothing of a whole step could be graded.
            StoreError: a checkpoint cannot be written or read.
        """
        self.resume()
        last: dict[str, Any] = {}
        total = self.config.optimiser.steps
        while self.step_number < total:
            report = self.step()
            every = self.config.run.evaluate_every
            if self._held_out and every and self.step_number % every == 0:
                last = self.evaluate()
                report.figures |= {f"held_out_{k}": v for k, v in last.items()}
            self._write(report)
            if on_step is not None:
                on_step(report)
            if self.step_number % self.config.run.save_every == 0 or self.step_number == total:
                self.save()
        if self._held_out and not last:
            last = self.evaluate()
        return last

    def step(self) -> StepReport:
        """Make groups, update the weights once a batch, and return the figures."""
        started = time.monotonic()
        number = self.step_number
        groups = self._groups(number)
        made = time.monotonic()
        rows = self._rows(groups)
        report = StepReport(number + 1, _group_figures(groups), groups)
        try:
            with _determinism(self.config.run.deterministic):
                results, norms = self._update(rows, number)
        except torch.cuda.OutOfMemoryError as exc:
            torch.cuda.empty_cache()
            raise ConfigError(
                f"step {number + 1}: the GPU's memory is used up; lower "
                "optimiser.micro_batch_tokens or rollout.max_rows, or set "
                "model.checkpoint_activations = true; the last checkpoint is whole"
            ) from exc
        self.step_number += 1
        if self._hints is not None and self.step_number % self._steps_per_epoch == 0:
            self._hints.epoch_end()
        ended = time.monotonic()
        report.figures |= self._figures(rows, results, norms)
        report.figures |= {
            "seconds": ended - started,
            "rollout_seconds": made - started,
            "verify_seconds": self._maker.figures.verify_seconds,
            "update_seconds": ended - made,
            "samples_per_s": sum(len(g.rollouts) for g in groups) * self._world / (ended - started),
        }
        tflop = training_tflop(
            self._parts.decoder.shape,
            int(report.figures["input_tokens"]),
            int(report.figures["trained_tokens"]),
        )
        report.figures["update_tflop_s"] = tflop / max(1e-9, ended - made)
        return report

    def evaluate(self) -> dict[str, Any]:
        """Ask the held-out tasks without hints; mean reward with an interval over tasks."""
        from tfgrpo.statistics import mean_interval

        run = self.config.run
        sampling = replace(self._sampling, temperature=run.evaluate_temperature)
        mine = self._held_out[self._rank :: self._world]
        groups = self._maker.make(
            mine,
            run.evaluate_draws,
            seed=derive_seed(run.seed, "held out"),
            sampling=sampling,
        )
        scores: dict[str, list[float]] = {}
        for part in distributed.gather_objects(
            {g.task.task_id: list(g.rewards_G) for g in groups if g.rewards_G}
        ):
            scores |= part
        if not scores:
            raise VerifierError(f"none of {len(self._held_out)} held-out tasks could be graded")
        found = mean_interval(scores)
        return {
            "mean": found.estimate,
            "low": found.low,
            "high": found.high,
            "tasks": len(scores),
            "step": self.step_number,
        }

    # -- groups and rows ---------------------------------------------------------------------

    @property
    def _steps_per_epoch(self) -> int:
        return max(1, len(self._tasks) // self.config.rollout.tasks_per_step)

    def tasks_of(self, step: int) -> list[Task]:
        """The tasks of a step: a fresh permutation each epoch, fixed by the seed."""
        n = min(self.config.rollout.tasks_per_step, len(self._tasks))
        epoch, position = divmod(step, self._steps_per_epoch)
        order = np.random.default_rng(derive_seed(self.config.run.seed, "order", epoch))
        chosen = order.permutation(len(self._tasks))[position * n : (position + 1) * n]
        return [self._tasks[i] for i in chosen]

    def _groups(self, step: int) -> list[RolloutGroup]:
        tasks = self.tasks_of(step)[self._rank :: self._world]
        seed = derive_seed(self.config.run.seed, "step", step)
        if self._make_groups is not None:
            groups = self._make_groups(tasks, seed)
        else:
            groups = self._maker.make(
                tasks, self.config.rollout.group_size, seed=seed, hints=self._hints
            )
        graded = sum(len(g.graded) for g in groups)
        if not sum(distributed.gather_objects(graded)):
            errors = [r.error for g in groups for r in g.rollouts if r.error]
            raise VerifierError(
                f"step {step + 1}: none of the rollouts could be graded; the first cause: "
                f"{errors[0] if errors else 'no rollouts'}"
            )
        return groups

    def _rows(self, groups: Sequence[RolloutGroup]) -> list[TrainRow]:
        """Graded rollouts as rows with advantages; groups of all processes are seen together."""
        graded = [(g, r) for g in groups for r in g.graded if any(s.token_ids for s in r.steps)]
        rows = [row_of(r, index=i) for i, (_, r) in enumerate(graded)]
        names = sorted({k for _, r in graded if r.score is not None for k in r.score.parts})
        numbers = {g.group_id: i for i, g in enumerate(groups)}
        mine = [
            (
                r.score.reward,
                numbers[g.group_id],
                row.n_loss,
                [r.score.parts.get(n, 0.0) for n in names],
            )
            for (g, r), row in zip(graded, rows, strict=True)
            if r.score is not None
        ]
        everyone = distributed.gather_objects((mine, len(groups)))
        at = sum(len(part) for part, _ in everyone[: self._rank])
        lengths = [row[2] for part, _ in everyone for row in part]
        advantage_R = _per_row(self._advantages(everyone, names), lengths)[at : at + len(mine)]
        engine = [tuple(p for s in r.steps for p in (s.logprobs or ())) or None for _, r in graded]
        return [
            TrainRow(
                row,
                advantage_R[i],
                reward=mine[i][0],
                group=mine[i][1],
                engine_logp=engine[i],
            )
            for i, row in enumerate(rows)
            if row.n_loss
        ]

    def _advantages(
        self, everyone: Sequence[tuple[list[Any], int]], names: Sequence[str]
    ) -> np.ndarray[Any, np.dtype[np.float64]]:
        rewards, groups, lengths, parts = [], [], [], []
        offset = 0
        for rows, n_groups in everyone:
            for reward, group, length, row_parts in rows:
                rewards.append(reward)
                groups.append(group + offset)
                lengths.append(length)
                parts.append(row_parts)
            offset += n_groups
        entry = lookup(ADVANTAGES, "advantage", self.config.loss.advantage)
        batch = RewardBatch(
            reward_R=np.array(rewards, dtype=np.float64),
            group_R=np.array(groups, dtype=np.int64),
            length_R=np.array(lengths, dtype=np.int64),
            part_RM=np.array(parts, dtype=np.float64) if names else None,
            part_names=tuple(names),
        )
        found: np.ndarray[Any, np.dtype[np.float64]] = entry.fn(
            batch, **self.config.loss.advantage_options
        )
        return found

    # -- update ------------------------------------------------------------------------------

    def _settings(self) -> UpdateSettings:
        loss, o = self.config.loss, self.config.optimiser
        return UpdateSettings(
            loss=loss.name,
            options=loss.options,
            aggregation=loss.aggregation,
            kl=loss.kl,
            entropy=loss.entropy,
            log_entropy=loss.log_entropy,
            skip_zero_advantage=loss.skip_zero_advantage,
            temperature=self.config.rollout.temperature,
            max_tokens=self.config.rollout.max_tokens,
            micro_batch_tokens=o.micro_batch_tokens,
            chunk=o.vocabulary_chunk,
        )

    def _update(self, rows: list[TrainRow], number: int) -> tuple[list[UpdateResult], list[float]]:
        o, settings = self.config.optimiser, self._settings()
        if self._reference is not None:
            reference = self._score(self._reference, rows)
            rows = [replace(r, ref_logp=reference[r.row.index]) for r in rows]
        reuses = o.epochs_per_batch * o.updates_per_epoch > 1
        if reuses:
            old = self._score(self._model, rows)
            rows = [replace(r, old_logp=old[r.row.index]) for r in rows]
        if settings.temperature != 1.0:
            self._gate(rows, self._first_scores(rows))
        parts = _split(rows, o.updates_per_epoch)
        results, norms = [], []
        lr = learning_rate(number, peak=o.lr, warmup=o.warmup, total=o.steps, schedule=o.schedule)
        for turn in range(o.epochs_per_batch * len(parts)):
            part = parts[turn % len(parts)]
            weight_R = self._token_weights(part, settings)
            result = accumulate(self._model, part, settings, weight_R)
            if turn == 0 and settings.temperature == 1.0:
                self._gate(part, result.logp)
            results.append(result)
            if not distributed.most_over_ranks(result.trained_tokens):
                continue  # nothing to learn from: not even momentum moves the weights
            norm = self.optimiser.step(lr)
            if not norm < float("inf"):
                raise ConfigError(
                    f"step {number + 1}: the gradient's norm is {norm}; the weights are unchanged. "
                    "Look for extreme rewards or advantages, or lower optimiser.lr; resume from "
                    "the last checkpoint"
                )
            if self._model is not self._parts.decoder:
                distributed.refresh(self._parts.decoder, self._model)
            if self._engine is not None:
                self._engine.sync(hf_views(self._parts.decoder))
            norms.append(norm)
        return results, norms

    def _token_weights(self, part: Sequence[TrainRow], settings: UpdateSettings) -> Any:
        """Weights from the lengths of all processes' rows together, times the number of processes,
        since gradients are averaged over them."""
        if self._world == 1:
            return token_weights(part, settings)
        stubs = distributed.gather_objects([replace(r, engine_logp=None) for r in part])
        at = sum(len(s) for s in stubs[: self._rank])
        return (
            token_weights([r for s in stubs for r in s], settings)[at : at + len(part)]
            * self._world
        )

    def _score(self, decoder: Decoder, rows: Sequence[TrainRow]) -> dict[int, tuple[float, ...]]:
        return score_rows(
            decoder,
            [r.row for r in rows],
            temperature=self.config.rollout.temperature,
            max_tokens=self.config.optimiser.micro_batch_tokens,
            chunk=self.config.optimiser.vocabulary_chunk,
        )

    def _first_scores(self, rows: Sequence[TrainRow]) -> dict[int, tuple[float, ...]]:
        return score_rows(
            self._parts.decoder,
            [r.row for r in rows[:64]],
            temperature=1.0,
            max_tokens=self.config.optimiser.micro_batch_tokens,
        )

    def _gate(self, rows: Sequence[TrainRow], logps: Mapping[int, tuple[float, ...]]) -> None:
        """Compare what the sampler reported with the trainer's scores; stop when they differ."""
        both = [
            (r.engine_logp, logps[r.row.index])
            for r in rows
            if r.engine_logp is not None and r.row.index in logps
        ]
        if not both:
            return
        found = measure_mismatch([a for a, _ in both], [b for _, b in both])
        self._mismatch = found
        limits = MismatchLimits(mean_abs=self.config.rollout.mismatch_mean)
        longest = max(len(a) for a, _ in both)
        check_mismatch(found, longest, limits, f"step {self.step_number + 1}")

    # -- figures -----------------------------------------------------------------------------

    def _figures(
        self, rows: Sequence[TrainRow], results: Sequence[UpdateResult], norms: Sequence[float]
    ) -> dict[str, Any]:
        made = self._maker.figures
        trained = sum(r.trained_tokens for r in results)
        mismatch = getattr(self, "_mismatch", None)
        figures = {
            "loss": sum(distributed.gather_objects(sum(r.loss for r in results))) / self._world,
            "grad_norm": max(norms, default=0.0),
            "rows": len(rows),
            "prompt_tokens": made.prompt_tokens,
            "completion_tokens": made.completion_tokens,
            "hinted_rollouts": made.hinted_rollouts,
            "trained_tokens": trained,
            "input_tokens": sum(r.input_tokens for r in results),
            "skipped_tokens": sum(r.skipped_tokens for r in results),
            "prompt_tokens_saved": sum(r.prompt_tokens_saved for r in results),
            "decode_steps": self.generator.counters.steps,
            "decode_row_steps": self.generator.counters.row_steps,
        }
        if mismatch is not None:
            figures |= {"mismatch_mean": mismatch.mean_abs, "mismatch_row": mismatch.max_row}
        if self.config.loss.log_entropy or self.config.loss.entropy:
            figures["entropy"] = sum(r.entropy_sum for r in results) / max(1, trained)
        for level, count in made.levels.items():
            figures[f"groups_{level}"] = count
        return figures

    def _write(self, report: StepReport) -> None:
        if self._rank:
            return
        if self._log is None:
            self._log = MetricsLog(
                self._folder / "metrics.jsonl", self.step_number - 1, self._sinks
            )
        self._log.write(report.step, report.figures)

    # -- weights and checkpoints -------------------------------------------------------------

    def _trained_model(self) -> Decoder:
        decoder = self._parts.decoder
        if self._world == 1:
            decoder.requires_grad_(True)
            decoder.checkpoint_blocks = self.config.model.checkpoint_activations
            return decoder
        if self.config.model.lora_rank:
            raise ConfigError("model.lora_rank with several processes is not supported: use one")
        trained = Decoder(
            decoder.shape,
            decoder.inv_freq,
            dtype=torch.float32,
            device=decoder.embed.device,
            rope_scale=decoder.rope_scale,
        )
        trained.load_state_dict(decoder.state_dict())
        trained.checkpoint_blocks = self.config.model.checkpoint_activations
        decoder.requires_grad_(False)
        return distributed.shard(trained)

    def _make_weights(self) -> Weights:
        m = self.config.model
        if not m.lora_rank:
            return FullWeights(self._model)
        return LoraWeights(
            self._model,
            rank=m.lora_rank,
            alpha=m.lora_alpha,
            targets=m.lora_targets or TARGETS,
            seed=self.config.run.seed,
        )

    @property
    def _identity(self) -> str:
        """Changes when a checkpoint of other settings would not continue the same run."""
        config = self.config.to_json()
        for section, names in (
            ("run", ("folder", "save_every", "keep", "evaluate_every", "tensorboard", "tracker")),
            ("optimiser", ("steps",)),
            ("tasks", ("path", "held_out")),
        ):
            for name in names:
                config[section].pop(name)
        return digest([config, [t.to_dict() for t in self._tasks], self._world], 16)

    def save(self) -> Path:
        """Write a checkpoint of this step and return its folder.

        Raises:
            StoreError: the disk refuses; earlier checkpoints are whole.
        """
        folder = self._folder / "checkpoints"
        tensors = {n: t.cpu() for n, t in self.optimiser.state().items()}
        parts = distributed.gather_objects(tensors)
        final = folder / f"step-{self.step_number:06d}"
        if self._rank == 0:
            state = {
                "identity": self._identity,
                "optimiser_steps": self.optimiser.steps,
                "hints": self._hints.state_dict() if self._hints is not None else {},
                "config": self.config.to_json(),
            }
            merged = {f"{i}.{n}": t for i, part in enumerate(parts) for n, t in part.items()}
            final = checkpoint.save(
                folder, self.step_number, state, merged, self.export, keep=self.config.run.keep
            )
        distributed.gather_objects(None)  # nobody goes on before the files are whole
        return final

    def export(self, folder: Path) -> None:
        """Write the model (and adapters) in Hugging Face form into an existing folder."""
        weights = checkpoint.model_weights(self._parts.decoder)
        checkpoint.write_tensors(folder / checkpoint.WEIGHTS, weights)
        if isinstance(self._weights, LoraWeights):
            from tfgrpo.rl.export import write_adapters

            write_adapters(folder, self._weights, self._parts.name)
        self._parts.save_extras(folder)

    def resume(self) -> bool:
        """Load the newest checkpoint of the run folder, if there is one.

        Raises:
            StoreError: it is damaged, or of a run with other settings.
        """
        done = checkpoint.found(self._folder / "checkpoints")
        if not done:
            return False
        state, weights, tensors = checkpoint.load(done[-1])
        if state["identity"] != self._identity:
            raise StoreError(
                f"checkpoint {str(done[-1])!r} belongs to a run with other settings, tasks or "
                "number of processes; choose another run.folder or restore the settings"
            )
        load_hf_weights(self._parts.decoder, weights)
        prefix = f"{self._rank}."
        mine = {n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)}
        self.optimiser.load(mine, state["optimiser_steps"])
        if self._hints is not None:
            self._hints.load_state_dict(state["hints"])
        self.step_number = int(state["step"])
        return True


class _Batches:
    """A plain `Generator` behind the queue interface: rounds of whole batches."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def run(self, requests: Any, sampling: Sampling, on_done: Any) -> None:
        waiting = list(requests)
        while waiting:
            size = len(waiting[0].seeds)
            batch = [r for r in waiting if len(r.seeds) == size]
            waiting = [r for r in waiting if len(r.seeds) != size]
            made = self._generator.generate(
                [r.prompt_ids for r in batch], size, sampling, [r.seeds for r in batch]
            )
            for request, rows in zip(batch, made, strict=True):
                waiting.extend(on_done(request, rows))


class _determinism:
    """Ask torch for equal bits in equal runs while a block runs."""

    def __init__(self, wanted: bool) -> None:
        self._wanted = wanted and torch.cuda.is_available()

    def __enter__(self) -> None:
        self._before = torch.are_deterministic_algorithms_enabled()
        if self._wanted:
            torch.use_deterministic_algorithms(True, warn_only=True)

    def __exit__(self, *_: object) -> None:
        torch.use_deterministic_algorithms(self._before)


def _check_tasks(
    tasks: Sequence[Task], held_out: Sequence[Task], verifier: Verifier, config: TrainConfig
) -> None:
    if not tasks:
        raise ConfigError("there are no training tasks: set tasks.path")
    seen = {t.task_id for t in tasks}
    if len(seen) != len(tasks):
        raise ConfigError("training tasks repeat a task_id: every task needs an id of its own")
    both = sorted(seen & {t.task_id for t in held_out})
    if both:
        raise ConfigError(
            f"{len(both)} held-out tasks are training tasks too, such as {both[0]!r}: take them out"
        )
    world = distributed.world()[1]
    if min(config.rollout.tasks_per_step, len(tasks)) < world:
        raise ConfigError(f"{world} processes need at least as many tasks a step")
    for task in (*tasks, *held_out):
        verifier.check_task(task)


def _per_row(
    advantage: np.ndarray[Any, np.dtype[np.float64]], lengths: Sequence[int]
) -> list[float | tuple[float, ...]]:
    """One advantage a row, or one a token cut into rows, by the estimator's own axis."""
    if len(advantage) == len(lengths):
        return [float(a) for a in advantage]
    if len(advantage) != sum(lengths):
        raise ConfigError(
            f"the estimator returned {len(advantage)} advantages for {len(lengths)} rollouts of "
            f"{sum(lengths)} tokens"
        )
    cuts = np.cumsum([0, *lengths])
    return [tuple(advantage[a:b].tolist()) for a, b in pairwise(cuts)]


def _split(rows: Sequence[TrainRow], n: int) -> list[list[TrainRow]]:
    """Cut rows into n optimiser batches of whole groups, nearly equal in groups."""
    groups = sorted({r.group for r in rows})
    cuts = np.array_split(np.array(groups), n)
    return [[r for r in rows if r.group in set(cut.tolist())] for cut in cuts if len(cut)]


def _frozen_copy(decoder: Decoder) -> Decoder:
    """A copy of the weights as they are now, for KL."""
    copy = Decoder(
        decoder.shape,
        decoder.inv_freq,
        dtype=decoder.embed.dtype,
        device=decoder.embed.device,
        rope_scale=decoder.rope_scale,
    )
    own = dict(copy.named_parameters())
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            own[name].copy_(distributed.whole(parameter.detach()))
    copy.requires_grad_(False)
    return copy


def _group_figures(groups: Sequence[RolloutGroup]) -> dict[str, Any]:
    rollouts = [r for g in groups for r in g.rollouts]
    rewards = [x for g in groups for x in g.rewards_G]
    lengths = [sum(len(s.token_ids or ()) for s in r.steps) for r in rollouts]
    return {
        "reward_mean": float(np.mean(rewards)) if rewards else 0.0,
        "reward_std": float(np.std(rewards)) if rewards else 0.0,
        "informative_share": sum(g.is_informative() for g in groups) / max(1, len(groups)),
        "graded_share": len(rewards) / max(1, len(rollouts)),
        "truncated_share": sum(r.is_truncated for r in rollouts) / max(1, len(rollouts)),
        "length_mean": float(np.mean(lengths)) if lengths else 0.0,
        "length_max": max(lengths, default=0),
    }


def load_parts(spec: str, *, device: str | None = None, dtype: str | None = None) -> Parts:
    """Load a model by its `local:` spec.

    Raises:
        ConfigError: another kind of spec, or a family that cannot be trained.
    """
    from tfgrpo.lm.local import load_model
    from tfgrpo.rl.generator import eos_ids_of
    from tfgrpo.rl.model import decoder_from_hf

    kind, _, name = spec.partition(":")
    if kind != "local" or not name:
        raise ConfigError(
            f"model.lm is {spec!r}: training needs the weights, so it must be 'local:PATH', "
            "'local:ORG/NAME' or 'local:smollm2-135m'"
        )
    loaded = load_model(name, device=device, dtype=dtype)
    model, tokenizer = loaded.model, loaded.tokenizer

    def save_extras(folder: Path) -> None:
        config = model.config
        config.architectures = [type(model).__name__]
        config.save_pretrained(folder)
        if model.generation_config is not None:
            model.generation_config.save_pretrained(folder)
        tokenizer.save_pretrained(folder)

    return Parts(
        decoder=decoder_from_hf(model),
        tokenizer=tokenizer,
        save_extras=save_extras,
        eos_ids=eos_ids_of(model, tokenizer),
        name=name,
    )


__all__ = ["Parts", "StepReport", "TfgrpoError", "Trainer", "load_parts"]
