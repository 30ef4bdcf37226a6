"""Every entry of every registry trains through the settings, or is refused with its cause."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from tests.benchmarks.rl.rl_registry import COLUMNS, REGISTRIES
from tests.rl.tiny import tiny_config, tiny_parts
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.formulas.registry import Entry
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Rollout, Score, Task

OPTIONS = {
    "overlong_soft": {"buffer": 4.0},
    "d3s": {"keep": 2.0},
    "length_outlier": {"k": 1.0},
    "seed_linear": {"alpha": 0.5},  # a random model's answers all differ, which alpha 1 takes for 0
    "seed_focal": {"alpha": 0.5},
    "gtpo_trajectory": {"limit": 9.0},  # and its entropy is near log V
}
REFUSED = {"nudge": r"extra:context_R.*set \[hints\]"}
"""Entries that a run without further sections refuses, with what it says."""


class Judge:
    """Rewards from the reply's own tokens, with two named parts."""

    verifier_id = "parity"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        ids = [t for s in rollout.steps for t in s.token_ids or ()]
        even = sum(t % 2 == 0 for t in ids) / len(ids)
        parts = {"structure": float(ids[0] % 3 == 0), "content": even}
        return Score(1.0 if even >= 0.6 else 0.05 * (ids[0] % 5), parts=parts)


class Duels(Judge):
    """The same, and each pair's verdict by the first token's remainder, as in a game of three."""

    async def score_group(self, rollouts: Sequence[Rollout], task: Task) -> list[Score]:
        firsts = [(r.steps[0].token_ids or (0,))[0] % 3 for r in rollouts]
        found = []
        for rollout, mine in zip(rollouts, firsts, strict=True):
            beats = {f"beats_{j}": (0.5, 1.0, 0.0)[(mine - x) % 3] for j, x in enumerate(firsts)}
            score = await self.score(rollout, task)
            found.append(Score(sum(beats.values()) / len(beats), parts={**score.parts, **beats}))
        return found


class Room:
    """Answers twice with the parity of what was said; a state is that parity."""

    def __init__(self, task: Task) -> None:
        self.states = ["start"]
        self.gains: list[float] = []

    async def act(self, action: Message) -> list[Message] | None:
        parity = sum(map(ord, action.content)) % 2
        self.gains.append(0.5 * parity)
        if len(self.gains) == 3:
            return None
        self.states.append(f"{len(self.states)} {parity}")
        return [Message("user", f"p{parity}")]

    def facts(self) -> dict[str, Any]:
        n = len(self.gains)
        return {
            "tool_calls": n,
            "invalid_actions": n // 2,
            "state_keys": self.states,
            "step_rewards": [*self.gains, 0.0],
        }


ENTRIES = [
    pytest.param(kind, entry, id=f"{kind}-{name}")
    for kind, registry in REGISTRIES.items()
    for name, entry in registry.items()
]


def settings(kind: str, entry: Entry, folder: Path) -> dict[str, dict[str, Any]]:
    """The sections that a stranger would write for this entry."""
    name = entry.name
    options = OPTIONS.get(name, {})
    sections: dict[str, dict[str, Any]] = {
        "verifier": {"kind": "function", "function": "somewhere:judge"},
        "rollout": {"group_size": 4, "tasks_per_step": 2, "max_tokens": 5},
        "optimiser": {"steps": 2, "lr": 1e-3, "micro_batch_tokens": 4000},
        "features": {c: s for c, s in COLUMNS.items() if f"extra:{c}" in entry.needs},
    }
    if kind == "losses":
        sections["loss"] = {"name": name}
        sections["optimiser"]["epochs_per_batch"] = 1 if "half_step" in entry.needs else 2
        if "verdicts" in entry.needs:
            sections["verifier"] = {"kind": "win_rate", "verdicts": True}
    elif kind == "aggregations":
        sections["loss"] = {"aggregation": name}
    elif kind == "advantages":
        sections["loss"] = {"advantage": name, "advantage_options": options}
    elif kind == "rewards":
        sections["rewards"] = {"names": [name], "options": {name: options} if options else {}}
    else:
        sections["credit"] = {"name": name, "options": options, "phrases": ["a", "b", "x"]}
    if {"steps", "step_rewards", "extra:tool_calls_R", "extra:invalid_R"} & set(entry.needs):
        sections["multi_turn"] = {
            "environment": "tests.rl.formulas.test_through_config:Room",
            "max_tokens": 100,
        }
        sections["rollout"] |= {"max_tokens": 12, "stop": list("ACEGIKMOQSUWYacegikmoqsuwy")}
    return sections


def tasks() -> list[Task]:
    return [
        Task(
            f"t{i}",
            f"task {chr(97 + i)}",
            reference="ab",
            metadata={"hops": i % 2, "target": 3 + i},
        )
        for i in range(4)
    ]


@pytest.mark.parametrize(("kind", "entry"), ENTRIES)
def test_every_entry_trains_a_step_or_is_refused_with_its_cause(
    kind: str, entry: Entry, tmp_path: Path
) -> None:
    sections = settings(kind, entry, tmp_path)
    if entry.name in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[entry.name]) as told:
            tiny_config(tmp_path, **sections)
        assert "\n" not in str(told.value)
        return
    config = tiny_config(tmp_path, **sections)
    judge = Duels() if "verdicts" in entry.needs else Judge()
    trainer = Trainer(config, tiny_parts(), tasks(), judge)
    norms: list[float] = []
    while len(norms) < 2 or (len(norms) < 8 and not any(norms)):
        figures = trainer.step().figures
        assert math.isfinite(figures["loss"]) and math.isfinite(figures["grad_norm"])
        norms.append(figures["grad_norm"])
    assert any(norms), "nothing was learnt from"


@pytest.mark.parametrize(("kind", "entry"), ENTRIES)
def test_a_need_without_its_setting_is_refused_in_one_line(
    kind: str, entry: Entry, tmp_path: Path
) -> None:
    """With nothing but the name, an entry either passes the check or says what to set."""
    sections = settings(kind, entry, tmp_path)
    for name in ("features", "multi_turn"):
        sections.pop(name, None)
    sections["verifier"] = {"kind": "exact"}
    if kind == "credit":
        sections["credit"].pop("phrases")
    asks = {n for n in entry.needs if n.startswith("extra:")}
    asks |= {"parts", "steps", "step_rewards", "verdicts"}
    unmet = asks & set(entry.needs) - ALWAYS
    if not unmet:
        assert tiny_config(tmp_path, **sections).loss.name
        return
    with pytest.raises(ConfigError, match="is not supplied here: ") as told:
        tiny_config(tmp_path, **sections)
    text = str(told.value)
    assert entry.name in text and "\n" not in text
    assert all(need in text for need in unmet)


ALWAYS = {
    "extra:prompt_confidence_R",
    "extra:prior_R",
    "extra:past_share_R",
    "extra:sum_square_D",
    "extra:tempered_logp_D",
    "extra:score_norm_R",
    "extra:ratio_R",
    "extra:think_entropy_R",
    "extra:answer_entropy_R",
}


def test_the_refused_are_few_and_are_entries() -> None:
    names = {name for registry in REGISTRIES.values() for name in registry}
    assert set(REFUSED) <= names and len(REFUSED) == 1


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rewards": {"names": ["overlong_soft"]}}, "needs the option buffer"),
        (
            {"rewards": {"names": ["tool_cost"], "options": {"otc": {}}}},
            "rewards.options names 'otc', which is not in rewards.names",
        ),
        ({"rewards": {"names": ["overlong_sof"]}}, "did you mean 'overlong_soft'"),
        (
            {"credit": {"name": "top_entropy", "options": {"shares": 0.1}}},
            "no option 'shares'; did you mean 'share'",
        ),
        (
            {"credit": {"name": "top_entropy"}, "loss": {"advantage": "rloo"}},
            "both make the advantages",
        ),
        ({"loss": {"options": {"eps": 0.2}}}, "loss 'clip' has no option 'eps'"),
        ({"features": {"tokens_R": "length"}}, r"features.tokens_R: no entry has it"),
        ({"features": {"target_R": "somewhere"}}, "allowed are 'task:KEY'"),
        (
            {"loss": {"name": "decoupled_clip"}, "rollout": {"temperature": 0.7}},
            "samplers tell log-probs at temperature 1",
        ),
        (
            {"loss": {"name": "nash_mp"}, "verifier": {"kind": "win_rate"}},
            "use a verifier of kind 'win_rate' with verdicts = true",
        ),
        (
            {
                "loss": {"name": "nash_mp"},
                "verifier": {"kind": "win_rate", "verdicts": True},
                "optimiser": {"epochs_per_batch": 2},
            },
            "needs half_step, .*set optimiser.epochs_per_batch and .* to 1 and leave past groups "
            "and engine.max_staleness out",
        ),
        (
            {
                "loss": {"name": "grao", "advantage": "gdpo"},
                "verifier": {"kind": "weighted", "parts": []},
            },
            "loss 'grao' with advantage 'gdpo': a reference has a reward and no parts",
        ),
        (
            {"loss": {"name": "rpo", "advantage": "nudge"}, "hints": {"name": "nudge"}},
            "under the bare prompt, which loss 'rpo' would compare with their group: set hints.dis",
        ),
        (
            {"loss": {"name": "power_dl"}},
            "needs passes, .*set optimiser.epochs_per_batch to 2 or more",
        ),
        (
            {"loss": {"advantage": "remax"}, "hints": {"name": "sage"}},
            "the greedy rollout is asked without hints",
        ),
    ],
)
def test_wrong_settings_of_the_registries_are_named(
    sections: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        TrainConfig.from_mapping(sections)


def test_a_column_without_a_number_names_its_task(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        loss={"advantage": "hop_baseline"},
        features={"class_R": "task:depth"},
    )
    with pytest.raises(ConfigError, match=r"task 't\d' has None there; .*'hops', 'target'"):
        Trainer(config, tiny_parts(), tasks(), Judge()).step()


def test_losses_without_a_ratio_are_those_that_replay_refuses() -> None:
    import torch

    from tfgrpo.rl.formulas.inputs import TokenBatch
    from tfgrpo.rl.formulas.losses import LOSSES

    def slope(entry: Entry, shift: list[float]) -> Any:
        logp_D = torch.tensor([-1.0, -2.0, -1.5, -0.7], dtype=torch.float64, requires_grad=True)
        batch = TokenBatch(
            logp_D=logp_D,
            old_logp_D=logp_D.detach() + torch.tensor(shift, dtype=torch.float64),
            advantage_D=torch.tensor([1.0, 1.0, -1.0, -1.0], dtype=torch.float64),
            row_D=torch.tensor([0, 0, 1, 1]),
            n_rows=2,
            entropy_D=torch.ones(4, dtype=torch.float64),
            ref_logp_D=logp_D.detach() - torch.tensor([0.1, 0.2, 0.0, 0.3]),
            behaviour_logp_D=logp_D.detach(),
            group_R=torch.tensor([0, 0]),
            reward_R=torch.tensor([1.0, 0.0], dtype=torch.float64),
            columns={"heat": torch.ones(4, dtype=torch.float64)},
            vocabulary=8,
        )
        options = {"next_gap_D": 0.0} if "next_gap" in entry.needs else {}
        return torch.autograd.grad(entry.fn(batch, **options).sum(), logp_D)[0]

    shifts = [[x, y, 0.0, -y] for x in (0.05, -0.5) for y in (0.1, -0.4)]
    blind = {
        name
        for name, entry in LOSSES.items()
        if all(torch.equal(slope(entry, s), slope(entry, [0.0] * 4)) for s in shifts)
    }
    assert blind == {name for name, entry in LOSSES.items() if "ratio" not in entry.needs}


def test_contexts_of_hints_reach_the_estimator_that_needs_them(tmp_path: Path) -> None:
    from tfgrpo.hints import make_scheduler
    from tfgrpo.rl.update.row_features import _contexts
    from tfgrpo.rl.update.train_rows import graded_of

    hints = {"name": "sage", "max_level": 1, "success_above": 0.99}
    config = tiny_config(tmp_path, loss={"advantage": "nudge"}, hints=hints)
    given = [Task(f"t{i}", "x", metadata={"hints": [f"hint {i}"]}) for i in range(6)]
    trainer = Trainer(config, tiny_parts(), given, Judge(), hints=make_scheduler(hints))
    report = trainer.step()
    graded = graded_of(report.groups)
    contexts = _contexts(graded)
    assert {contexts[g.row.index] for g in graded} == {-1, 0}
    for g in graded:
        assert (contexts[g.row.index] == -1) == (not g.of.context.parts)
    assert math.isfinite(report.figures["grad_norm"])
