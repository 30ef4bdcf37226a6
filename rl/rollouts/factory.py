"""Builds the rollout makers of a training run from its config.

Does not know training. Source: own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from tfgrpo.protocols import Generated, Generator, Sampling, Verifier
from tfgrpo.rl.checkpoints.loaded_model import LoadedModel
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.generation.generator import GroupGenerator
from tfgrpo.rl.generation.requests import Counters, GroupRequest
from tfgrpo.rl.rollouts import plugins as plug
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.multi_turn import Judging, MultiTurnMaker, TurnSetup
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.rollouts.turn_tools import STOP, OffersTools, TurnText
from tfgrpo.rl.rollouts.turns import TurnLimits
from tfgrpo.runtime.canonical import derive_seed


def own_generator(
    config: TrainConfig, parts: LoadedModel, memory: Tensor | None = None
) -> GroupGenerator:
    """Return the sampler on the trained weights; `memory` is its own between updates."""
    r = config.rollout
    generator = GroupGenerator(
        parts.decoder,
        eos_ids=parts.eos_ids,
        detokenize=parts.text_of,
        max_rows=r.max_rows,
        poll_steps=r.poll_steps,
        fixed_rows=r.fixed_rows,
    )
    generator.lend(memory)
    return generator


def train_sampling(config: TrainConfig) -> Sampling:
    """Return how training rollouts are drawn."""
    r = config.rollout
    extra = {"ignore_eos": True} if r.ignore_eos else {}
    return Sampling(temperature=r.temperature, max_tokens=r.max_tokens, stop=r.stop, extra=extra)


def prompter_of(config: TrainConfig, parts: LoadedModel) -> Prompter:
    """Return what turns tasks into token ids, with the tools where there are some."""
    tools = plug.tools_of(config.multi_turn)
    return Prompter(
        tokenizer_of(config, parts),
        system=plug.system_text(config, tools),
        template=config.model.template,
        context_tokens=parts.decoder.shape.context,
    )


def tokenizer_of(config: TrainConfig, parts: LoadedModel) -> Any:
    """Return the tokenizer; where calls are native, its template is given the tools."""
    tools = plug.tools_of(config.multi_turn)
    native = tools and config.multi_turn.calls == "native"
    return OffersTools(parts.tokenizer, tools) if native else parts.tokenizer


def maker_of(
    config: TrainConfig,
    parts: LoadedModel,
    verifier: Verifier,
    own: CountingGenerator,
    engine: Generator | None,
) -> SingleTurnMaker | MultiTurnMaker:
    """Return what makes groups: of one turn, or of several where [multi_turn] is set.

    Raises:
        ConfigError: tools that cannot be loaded, or a chat template that cannot be continued.
    """
    tools = plug.tools_of(config.multi_turn)
    prompter = prompter_of(config, parts)
    sampling = train_sampling(config)
    r = config.rollout
    policy_id = f"train:{parts.name}"
    if not config.multi_turn.is_on:
        queue = own if engine is None else BatchQueue(engine)
        return SingleTurnMaker(
            queue,
            Grader(prompter, verifier, r.on_truncated, r.verifier_timeout_s),
            sampling,
            policy_id=policy_id,
        )
    if tools and config.multi_turn.calls == "text":
        sampling = replace(sampling, stop=(*sampling.stop, STOP))
    turns = TurnSetup(
        plug.environment_of(config.multi_turn, tools),
        TurnText(prompter.tokenizer, template=config.model.template, eos_ids=parts.eos_ids),
        TurnLimits(
            config.multi_turn.max_turns,
            min(config.multi_turn.max_tokens, parts.decoder.shape.context),
        ),
        config.multi_turn.tool_timeout_s,
        recalls=bool(config.multi_turn.tools),
    )
    judging = Judging(verifier, r.on_truncated, r.verifier_timeout_s)
    return MultiTurnMaker(engine or own, prompter, judging, sampling, turns, policy_id=policy_id)


class CountingGenerator:
    """The trainer's own sampler; adds up what several runs of it cost."""

    def __init__(self, own: GroupGenerator) -> None:
        self._own = own
        self._spent = Counters()

    def run(self, requests: Any, sampling: Sampling, on_done: Any, feed: Any = None) -> None:
        """Serve a queue."""
        self._own.run(requests, sampling, on_done, feed)
        self._spent.add(self._own.counters)

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        """Return n continuations a prompt."""
        made = self._own.generate(token_ids, n, sampling, seeds)
        self._spent.add(self._own.counters)
        return made

    def sync(self, named_params: Mapping[str, Any]) -> None:
        """Take weights."""
        self._own.sync(named_params)

    def take(self) -> Counters:
        """Return what was done since the last call."""
        found, self._spent = self._spent, Counters()
        return found


class BatchQueue:
    """A plain `Generator` behind the queue interface: rounds of whole batches."""

    def __init__(self, generator: Generator) -> None:
        self._generator = generator

    def run(self, requests: Any, sampling: Sampling, on_done: Any) -> None:
        """Serve requests and those that `on_done` adds."""
        waiting = list(requests)
        while waiting:
            size, limit = len(waiting[0].seeds), waiting[0].max_tokens
            batch = [r for r in waiting if (len(r.seeds), r.max_tokens) == (size, limit)]
            waiting = [r for r in waiting if (len(r.seeds), r.max_tokens) != (size, limit)]
            made = self._generator.generate(
                [r.prompt_ids for r in batch],
                size,
                replace(sampling, max_tokens=limit),
                [_seeds_from(r) for r in batch],
            )
            for request, rows in zip(batch, made, strict=True):
                waiting.extend(on_done(request, rows))


def _seeds_from(request: GroupRequest) -> tuple[int, ...]:
    """Return seeds of a request's own tokens: an engine counts from 0 where a row goes on."""
    if not request.start:
        return request.seeds
    return tuple(derive_seed(seed, "from", request.start) for seed in request.seeds)
