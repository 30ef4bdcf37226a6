"""Rows under the bare prompt, the two offline objectives, and a loop that resumes bit by bit."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from tests.rl.tiny import CharTokenizer, tiny_decoder, tiny_parts
from tfgrpo.context import EMPTY_CONTEXT, Context, ContextPart
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.messages import Message
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.distillation.distiller import Distiller, DistillSettings
from tfgrpo.rl.distillation.objectives import Imitation, NearTeacher, batch_of
from tfgrpo.rl.distillation.rows import (
    DistillRow,
    balanced,
    counts_by_source,
    graded,
    rows_of_groups,
    verified,
)
from tfgrpo.rl.model.packing import Row, pack
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task

LIBRARY = Context((ContextPart("lesson", "answer z"),))


def reply(i: int, ids: tuple[int, ...], reward: float | None, *, cut: bool = False) -> Rollout:
    step = Step(Message("assistant", "zz"), token_ids=ids)
    made = Rollout(f"r{i}", "", steps=(step,), is_truncated=cut)
    return made if reward is None else made.graded(Score(reward))


def group(task_id: str, rollouts: list[Rollout], context: Context = LIBRARY) -> RolloutGroup:
    task = Task(task_id, f"say {task_id}")
    own = tuple(replace(r, task_id=task_id) for r in rollouts)
    return RolloutGroup(f"g-{task_id}", task, own, context, "p")


def prompter() -> Prompter:
    return Prompter(CharTokenizer(), context_tokens=128)


def rows_from(groups: list[RolloutGroup], keep=None, own: bool = True) -> list[DistillRow]:
    return rows_of_groups(
        groups, prompter(), keep=keep or verified(1.0), source="library", end_id=2, own_tokens=own
    )


def test_only_verified_whole_replies_are_kept_and_equal_ones_count() -> None:
    rollouts = [
        reply(0, (5, 2), 1.0),
        reply(1, (5, 2), 1.0),
        reply(2, (6, 2), 0.3),
        reply(3, (7, 7), 1.0, cut=True),
        reply(4, (8, 2), None),
    ]
    rows = rows_from([group("a", rollouts)])
    assert [(r.row.suffix_ids, r.count) for r in rows] == [((5, 2), 2)]
    kept = rows_from([group("a", rollouts)], graded)
    assert [r.row.suffix_ids for r in kept] == [(5, 2), (6, 2), (7, 7)]


def test_a_row_is_scored_under_the_bare_prompt_and_its_teacher_under_the_library() -> None:
    (row,) = rows_from([group("a", [reply(0, (5, 2), 1.0)])])
    prompts, task = prompter(), Task("a", "say a")
    assert row.row.prompt_ids == prompts.ids(task)
    assert row.teacher is not None
    assert row.teacher.prompt_ids == prompts.ids(task, LIBRARY) != row.row.prompt_ids
    assert row.teacher.suffix_ids == row.row.suffix_ids
    (bare,) = rows_from([group("a", [reply(0, (5, 2), 1.0)], EMPTY_CONTEXT)])
    assert bare.teacher is None


def test_another_models_text_is_tokenised_and_ended() -> None:
    (row,) = rows_from([group("a", [reply(0, (5, 2), 1.0)])], own=False)
    assert row.row.suffix_ids == (3 + ord("z") % 61, 3 + ord("z") % 61, 2)


def test_every_task_weighs_the_same_and_the_most_frequent_replies_stay() -> None:
    many = [reply(0, (5, 2), 1.0), *(reply(i, (6, 2), 1.0) for i in (1, 2)), reply(3, (7, 2), 1.0)]
    rows = balanced(rows_from([group("a", many), group("b", [reply(4, (5, 2), 1.0)])]), per_task=2)
    assert [(r.task_id, r.row.suffix_ids, r.count) for r in rows] == [
        ("a", (6, 2), 2),
        ("a", (5, 2), 1),
        ("b", (5, 2), 1),
    ]
    assert [r.weight for r in rows] == pytest.approx([1 / 3, 1 / 6, 1 / 2])
    assert [r.row.index for r in rows] == [0, 1, 2]
    assert all(r.teacher is not None and r.teacher.index == r.row.index for r in rows)
    assert counts_by_source(rows) == {"library": 3}


def test_several_steps_are_refused() -> None:
    twice = Rollout("r", "", steps=(Step(Message("assistant", "x")),) * 2).graded(Score(1.0))
    with pytest.raises(ConfigError, match="2 steps"):
        rows_from([group("a", [twice])])


def test_an_epoch_shows_every_item_once_in_another_order() -> None:
    epochs = [[x for s in (3 * e, 3 * e + 1, 3 * e + 2) for x in batch_of(range(8), s, 3, 7)]
              for e in range(2)]  # fmt: skip
    assert sorted(epochs[0]) == sorted(epochs[1]) == list(range(8))
    assert epochs[0] != epochs[1]


def some_rows() -> list[DistillRow]:
    rows = [
        DistillRow(Row(0, (4, 5), (6, 7, 2)), Row(0, (9, 8, 4, 5), (6, 7, 2)), "a", "library", 3),
        DistillRow(Row(0, (4, 5), (6, 2)), Row(0, (9, 8, 4, 5), (6, 2)), "a", "library", 1),
        DistillRow(Row(0, (10,), (11, 2)), Row(0, (9, 8, 10), (11, 2)), "b", "library", 1),
    ]
    return balanced(rows)


def logp(decoder, prompt: tuple[int, ...], suffix: tuple[int, ...]) -> torch.Tensor:
    """log π of every token of the vocabulary before each suffix token, one sequence alone."""
    packed = pack([Row(0, prompt, suffix)])
    hidden = decoder(packed)[packed.head_D]
    return (hidden @ decoder.head_weight.t()).log_softmax(-1)


def gradients(decoder) -> dict[str, torch.Tensor]:
    return {n: p.grad.clone() for n, p in decoder.named_parameters() if p.grad is not None}


def assert_same_gradients(ours, theirs) -> None:
    assert ours.keys() == theirs.keys() and ours
    for name in ours:
        assert torch.allclose(ours[name], theirs[name], atol=1e-6, rtol=1e-4), name


def test_imitation_is_the_weighted_likelihood_under_the_bare_prompt() -> None:
    rows, decoder = some_rows(), tiny_decoder()
    decoder.requires_grad_(True)
    loss = Imitation(rows, tasks_per_step=2).accumulate(decoder, 0)["loss"]
    ours = gradients(decoder)
    decoder.zero_grad()
    brute = torch.zeros(())
    for row in rows:
        targets = torch.tensor(row.row.suffix_ids)[:, None]
        brute = brute - row.weight * (
            logp(decoder, row.row.prompt_ids, row.row.suffix_ids).gather(-1, targets).mean()
        )
    brute.backward()
    assert loss == pytest.approx(brute.item(), rel=1e-5)
    assert_same_gradients(ours, gradients(decoder))


@pytest.mark.parametrize("direction", ["forward", "reverse"])
@pytest.mark.parametrize("top_k", [0, 64])
def test_near_teacher_is_the_divergence_from_the_start_under_the_context(direction, top_k) -> None:
    rows, decoder = some_rows(), tiny_decoder()
    decoder.requires_grad_(True)
    teachers = [logp(decoder, r.teacher.prompt_ids, r.teacher.suffix_ids).detach() for r in rows]
    objective = NearTeacher(decoder, rows, direction=direction, top_k=top_k, tasks_per_step=2)
    with torch.no_grad():  # the teacher is what was there when the objective was made
        for parameter in decoder.parameters():
            parameter.mul_(0.9)
    loss = objective.accumulate(decoder, 0)["loss"]
    ours = gradients(decoder)
    decoder.zero_grad()
    brute = torch.zeros(())
    for row, logq in zip(rows, teachers, strict=True):
        mine = logp(decoder, row.row.prompt_ids, row.row.suffix_ids)
        a, b = (logq, mine) if direction == "forward" else (mine, logq)
        brute = brute + row.weight * (a.exp() * (a - b)).sum(-1).mean()
    brute.backward()
    assert loss == pytest.approx(brute.item(), rel=1e-4)
    assert_same_gradients(ours, gradients(decoder))


def test_a_few_tokens_of_the_teacher_bound_its_divergence_from_below() -> None:
    rows, decoder = some_rows(), tiny_decoder()
    decoder.requires_grad_(True)
    few, all_ = (
        NearTeacher(decoder, rows, top_k=k, tasks_per_step=2).accumulate(decoder, 0)["loss"]
        for k in (4, 0)
    )
    assert 0 < few < all_


def test_nothing_to_distil_is_one_clear_line() -> None:
    with pytest.raises(ConfigError, match="nothing to distil"):
        Imitation([])
    bare = balanced([DistillRow(Row(0, (4,), (5,)), None, "a", "journal")])
    with pytest.raises(ConfigError, match="nothing to distil"):
        NearTeacher(tiny_decoder(), bare)


def make(folder, steps: int = 6, rank: int = 0) -> Distiller:
    objective = Imitation(some_rows(), tasks_per_step=1)
    chosen = DistillSettings(steps=steps, lr=1e-2, save_every=2, lora_rank=rank)
    return Distiller(tiny_parts(), objective, chosen, folder)


def fingerprint(distiller: Distiller) -> dict[str, str]:
    return {n: checkpoint.bits(t) for n, t in distiller.optimiser.state()}


@pytest.mark.parametrize("rank", [0, 2])
def test_a_distilled_model_says_it_without_the_context_and_resumes_bit_by_bit(
    tmp_path, rank
) -> None:
    whole = make(tmp_path / "whole", steps=30, rank=rank)
    losses: list[float] = []
    whole.run(lambda _, figures: losses.append(figures["loss"]))
    fraction = 0.8 if rank else 0.5  # adapters of rank 2 can say less
    assert sum(losses[-4:]) < fraction * sum(losses[:4])
    cut = make(tmp_path / "cut", steps=30, rank=rank)
    while cut.step_number < 5:
        cut.step()
        if cut.step_number == 4:
            cut.save()
    again = make(tmp_path / "cut", steps=30, rank=rank)
    again.run()
    assert again.step_number == whole.step_number == 30
    assert fingerprint(again) == fingerprint(whole)


def test_a_checkpoint_of_other_rows_is_refused(tmp_path) -> None:
    first = make(tmp_path)
    first.step()
    first.save()
    other = Imitation(some_rows()[:2], tasks_per_step=1)
    settings = DistillSettings(steps=6, lr=1e-2, save_every=2)
    with pytest.raises(StoreError, match="other settings, tasks or rows"):
        Distiller(tiny_parts(), other, settings, tmp_path).run()
