"""Second tries behind the real makers and the real trainer: counts, tokens, rows, gradients."""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")

from tests.hints.groups import SOLUTION
from tests.rl.distillation.test_distiller import assert_same_gradients, gradients
from tests.rl.rollouts.test_multi_turn import END, ChatTokenizer, Says
from tests.rl.test_trainer import comparable, fingerprint
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts
from tfgrpo.errors import ConfigError
from tfgrpo.hints import make_scheduler
from tfgrpo.hints.second_tries.contexts import Icpo
from tfgrpo.messages import Message
from tfgrpo.protocols import Generated, HintScheduler, Sampling
from tfgrpo.rl.distillation.fresh_groups import Drawn
from tfgrpo.rl.distillation.icpo import IcpoSettings, accumulate_icpo
from tfgrpo.rl.distillation.nudgerl import NudgeSettings, accumulate_nudge
from tfgrpo.rl.distillation.objectives import PassSettings
from tfgrpo.rl.generation.requests import GroupRequest, OnDone
from tfgrpo.rl.hint_notes import is_hinted
from tfgrpo.rl.rollouts.grading import Grader
from tfgrpo.rl.rollouts.multi_turn import Judging, MultiTurnMaker, TurnSetup
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.single_turn import SingleTurnMaker
from tfgrpo.rl.rollouts.turn_tools import TurnText
from tfgrpo.rl.rollouts.turns import TurnLimits
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.accumulate import TrainRow, accumulate
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Task

G = 4
Say = Callable[[str, int], str]
"""(prompt's text, number of the draw) to a reply."""


class Voice:
    """A generator that says what a function of the prompt says; queue and batch interface."""

    def __init__(self, say: Say) -> None:
        self._say = say
        self.prompts: list[str] = []

    def _row(self, ids: Sequence[int]) -> Generated:
        text = ChatTokenizer().decode(ids)
        said = self._say(text, len(self.prompts))
        self.prompts.append(text)
        tokens = [2 if c == END else ord(c) for c in said]
        return Generated(tuple(tokens), (-0.5,) * len(tokens), "stop")

    def run(self, requests: Iterable[GroupRequest], sampling: Sampling, on_done: OnDone) -> object:
        queue = deque(requests)
        while queue:
            request = queue.popleft()
            rows = [self._row(request.prompt_ids) for _ in request.seeds]
            queue.extend(on_done(request, rows))
        return None

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        return [[self._row(ids) for _ in row] for ids, row in zip(token_ids, seeds, strict=True)]

    def sync(self, named_params: Any) -> None:
        """Nothing to take."""


def maker(say: Say, context_tokens: int = 9000) -> tuple[SingleTurnMaker, Voice]:
    voice = Voice(say)
    prompter = Prompter(ChatTokenizer(), context_tokens=context_tokens)
    prompter.tokenizer.eos_token_id = 2
    grader = Grader(prompter, Says())
    made = SingleTurnMaker(voice, grader, Sampling(max_tokens=400), policy_id="p")
    return made, voice


ONE = Task("one", "17 + 25?", reference="42", metadata={"solution": SOLUTION})
HINTS = json.dumps({"level_1": "add", "level_2": "tens", "level_3": "carry"})


def test_texts_are_drawn_in_the_queue_and_count_as_tries_not_as_rollouts() -> None:
    replies = deque(["?", HINTS])

    def say(prompt: str, number: int) -> str:
        if "You are a tutor" in prompt:
            return replies.popleft()
        return "42" if "Hint: tens" in prompt else "41"

    made, voice = maker(say)
    sage = make_scheduler({"name": "sage", "rewrite": "visit"})
    (group,) = made.make([ONE], G, seed=1, hints=sage)
    assert group.rewards_G == (1.0,) * G and "tens" in group.context.parts[0].text
    figures = made.figures
    assert (figures.writes, figures.writes_unread, figures.rollouts) == (2, 1, 3 * G)
    assert figures.write_tokens == len("?") + len(HINTS)
    assert figures.completion_tokens == 3 * G * 2
    assert len({r.steps[0].prompt_token_ids for r in group.rollouts}) == 1
    assert len(voice.prompts) == 3 * G + 2


def test_a_request_for_a_text_that_fills_the_context_is_not_drawn() -> None:
    made, voice = maker(lambda prompt, number: "41", context_tokens=300)
    sage = make_scheduler({"name": "sage", "rewrite": "visit", "max_level": 1})
    (group,) = made.make([ONE], G, seed=1, hints=sage)
    assert made.figures.writes == 0 and not any("tutor" in p for p in voice.prompts)
    assert group.context.parts[0].source == "hint:reference:1"  # the cut solution


def test_drafts_and_refinements_are_exactly_as_many_as_asked_for() -> None:
    made, voice = maker(lambda prompt, number: f"try {number}")
    igrpo = make_scheduler({"name": "igrpo", "drafts": 3, "refinements": 2})
    two = Task("two", "2 + 2?", reference="4")
    groups = made.make([ONE, two], G, seed=1, hints=igrpo)
    assert made.figures.rollouts == 2 * (3 + 2) and [len(g.rollouts) for g in groups] == [2, 2]
    drafted = [p for p in voice.prompts if "An earlier draft" in p]
    assert len(drafted) == 2 * 2 and all("try " in p for p in drafted)


def test_a_repaired_answer_is_the_attempts_own_tokens_and_the_experts_steps() -> None:
    one = Task("t", "?", reference="42", metadata={"solution": "A.\nB.\nso 42."})

    def say(prompt: str, number: int) -> str:
        if "Name the first step" in prompt:
            return '{"first_wrong_step": 1}'
        return f"right.\nwrong {number}.\n{END}"

    made, voice = maker(say)
    scope = make_scheduler({"name": "scope", "weight": 0.5})
    (group,) = made.make([one], G, seed=1, hints=scope)
    repaired, *others = group.rollouts
    assert group.rewards_G == (1.0, 0.0, 0.0, 0.0)
    assert repaired.answer == "right.\nB.\nso 42."
    bare = made.prompter.ids(one)
    own = tuple(map(ord, "right.\n"))
    step = repaired.steps[0]
    assert step.prompt_token_ids == bare + own
    assert step.token_ids == (*map(ord, "B.\nso 42."), 2) and step.logprobs is None
    assert repaired.metadata["hint"]["weight"] == 0.5
    assert len(voice.prompts) == G + 1  # nothing was drawn for it
    assert others[0].steps[0].token_ids[: len(own)] == own


class Doors:
    """Three doors in a row; `right` opens one. The state is how many are open."""

    def __init__(self, task: Task) -> None:
        self.open, self.states = 0, ["0"]

    async def act(self, action: Message) -> list[Message] | None:
        self.open += "right" in action.content
        self.states.append(str(self.open))
        if "stop" in action.content or len(self.states) > 4:
            return None
        return [Message("user", f"open: {self.open}")]

    def facts(self) -> dict[str, Any]:
        return {"state_keys": list(self.states)}


REFLECTION = (
    '{"outcome": "failure", "cause": "x", "suggestion": "do say stop", "retry_from_step": 1}'
)


def player(say: Say, environment: Any = Doors) -> tuple[MultiTurnMaker, Voice]:
    voice, tokenizer = Voice(say), ChatTokenizer()
    made = MultiTurnMaker(
        voice,
        Prompter(tokenizer, context_tokens=5000),
        Judging(Says()),
        Sampling(max_tokens=200),
        TurnSetup(
            environment,
            TurnText(tokenizer, template="chat", eos_ids=(2,)),
            TurnLimits(max_turns=4, max_tokens=5000),
        ),
        policy_id="p",
    )
    return made, voice


def doors(prompt: str, number: int) -> str:
    if "Find what went wrong" in prompt:
        return REFLECTION
    turn = prompt.count("[assistant]") - 1
    if turn == 0:
        return "go right" + END
    return ("stop" if "do say stop" in prompt else "left") + END


GOAL = Task("goal", "Open.", reference="stop")


def test_a_retry_takes_the_turns_before_its_step_again() -> None:
    made, _ = player(doors)
    r3l = make_scheduler({"name": "r3l"})
    (group,) = made.make([GOAL], 2 * G, seed=1, hints=r3l)
    attempts, retries = group.rollouts[:G], group.rollouts[G:]
    assert group.rewards_G == (0.0,) * G + (1.0,) * G
    assert made.figures.rollouts == 2 * G and made.figures.writes == G
    for attempt, retry in zip(attempts, retries, strict=True):
        # what stood before the named step is the same: action, tokens, and the world's answer
        assert retry.steps[0].action == attempt.steps[0].action
        assert retry.steps[0].token_ids == attempt.steps[0].token_ids
        assert retry.steps[0].observations == attempt.steps[0].observations
        assert retry.metadata["state_keys"][:2] == attempt.metadata["state_keys"][:2]
        row_of(retry, index=0)  # one growing sequence
    (beside,) = made.beside.values()
    assert [g.rewards_G for g in beside] == [(1.0,)] * (2 * G)


def test_full_attempts_and_unreadable_reflections_are_never_retried() -> None:
    made, _ = player(lambda prompt, number: "stop" + END)
    (group,) = made.make([GOAL], 2 * G, seed=1, hints=make_scheduler({"name": "r3l"}))
    assert len(group.rollouts) == G and made.figures.writes == 0

    def mute(prompt: str, number: int) -> str:
        return "no" if "Find what went wrong" in prompt else "left" + END

    made, _ = player(mute)
    (group,) = made.make([GOAL], 2 * G, seed=1, hints=make_scheduler({"name": "r3l"}))
    assert len(group.rollouts) == G and made.figures.writes_unread == G and not made.beside


def test_without_hints_rollouts_of_several_turns_are_what_they_were() -> None:
    plain, _ = player(doors)
    hinted, _ = player(doors)
    sage = make_scheduler({"name": "sage", "missing": "plain"})
    want = plain.make([GOAL], G, seed=1)
    got = hinted.make([GOAL], G, seed=1, hints=sage)
    assert [g.to_dict() for g in got] == [g.to_dict() for g in want]


class Breaks(Doors):
    """An environment that fails in its second turn."""

    async def act(self, action: Message) -> list[Message] | None:
        if len(self.states) > 1:
            raise RuntimeError("broken")
        return await super().act(action)


def test_an_environment_that_fails_ends_its_rollouts_and_not_the_visit() -> None:
    made, _ = player(doors, Breaks)
    groups = made.make(
        [GOAL, Task("two", "x", "stop")], G, seed=1, hints=make_scheduler({"name": "r3l"})
    )
    assert {r.outcome for g in groups for r in g.rollouts} == {"policy_failed"}


def test_a_forced_start_is_refused_where_rollouts_have_several_turns(tmp_path: Path) -> None:
    for name in ("adhint", "stephint", "bread", "scope"):
        with pytest.raises(ConfigError, match="forces the start of a reply"):
            tiny_config(tmp_path, hints={"name": name}, multi_turn={"environment": "a:b"})
    config = tiny_config(
        tmp_path,
        hints={"name": "r3l"},
        multi_turn={"environment": "tests.rl.rollouts.test_second_tries:Doors"},
    )
    assert config.multi_turn.is_on


# ── in the trainer ──────────────────────────────────────────────────────────────────────────────

TASKS = [
    Task(
        f"t{i}",
        f"task {chr(97 + i)}",
        metadata={"solution": "a b c d e f g h", "strategies": ["xy", "zz z"], "hints": ["h", "i"]},
    )
    for i in range(6)
]


class First(EvenTokens):
    """1 where the first token is even."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        ids = rollout.steps[-1].token_ids or (1,)
        return Score(float(ids[0] % 2 == 0))


def trainer_of(folder: Path, hints: dict[str, Any] | None, **sections: Any) -> Trainer:
    optimiser = {"lr": 1e-3, "micro_batch_tokens": 4000, **sections.pop("optimiser", {})}
    section = {} if hints is None else {"hints": hints}
    config = tiny_config(folder, optimiser=optimiser, **section, **sections)
    scheduler: HintScheduler | None = None if hints is None else make_scheduler(hints, tasks=TASKS)
    return Trainer(config, tiny_parts(), TASKS, First(), hints=scheduler)


def rows_of(
    trainer: Trainer, groups: Sequence[RolloutGroup]
) -> tuple[list[TrainRow], frozenset[int]]:
    return trainer._row_maker.rows(groups, 0)


@pytest.mark.parametrize(
    "section",
    [
        {"name": "igrpo", "drafts": 0},
        {"name": "icpo", "expert": 0},
        {"name": "scope", "weight": 0.0},
        {"name": "nudge", "strategies": ["a"], "per_context": 4, "dropout": 1.0, "distil": 0.0},
    ],
    ids=lambda s: str(s["name"]),
)
def test_a_second_try_of_strength_zero_is_grpo_bit_by_bit(
    section: dict[str, Any], tmp_path: Path
) -> None:
    name = str(section["name"])
    loss = {"loss": {"advantage": "nudge"}} if name == "nudge" else {}
    helped = trainer_of(tmp_path / "a", section, **loss)
    plain = trainer_of(tmp_path / "b", None)
    if name == "nudge":  # its own advantage; the rollouts alone must be equal
        got, want = helped.step().groups, plain.step().groups
        assert [[r.steps for r in g.rollouts] for g in got] == [
            [r.steps for r in g.rollouts] for g in want
        ]
        return
    for _ in range(2):
        got_figures, want_figures = helped.step().figures, plain.step().figures
        shared = comparable(want_figures).keys()
        assert {k: got_figures[k] for k in shared} == comparable(want_figures)
    assert fingerprint(helped) == fingerprint(plain)


def test_drafts_bear_no_loss(tmp_path: Path) -> None:
    trainer = trainer_of(tmp_path, {"name": "igrpo", "drafts": 3})
    report = trainer.step()
    assert report.figures["rollouts"] == 3 * (3 + 4)
    assert report.figures["rows"] == 3 * 4
    assert {r.metadata["hint"]["label"] for g in report.groups for r in g.rollouts} == {
        "draft:self:1"
    }
    bare = {trainer._maker.prompter.ids(t) for t in TASKS}
    for group in trainer._maker.make(TASKS, 1, seed=0):  # as held-out tasks are asked
        assert {r.steps[0].prompt_token_ids for r in group.rollouts} <= bare


def test_a_perturbed_success_is_trained_bare_over_its_samplers_log_probs(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        {"name": "lope", "resamples": 8, "words": [2, 3], "success_above": 0.9},
        rollout={"group_size": 2, "tasks_per_step": 6},
    )
    report = trainer.step()
    rows, stale = rows_of(trainer, report.groups)
    graded = [(g, r) for g in report.groups for r in g.rollouts]
    perturbed = [i for i, (_, r) in enumerate(graded) if is_hinted(r)]
    assert perturbed and set(perturbed) == stale
    for i in perturbed:
        group, rollout = graded[i]
        row = next(r for r in rows if r.row.index == i)
        assert row.row.prompt_ids == trainer._maker.prompter.ids(group.task)
        assert row.row.prompt_ids != rollout.steps[0].prompt_token_ids
        assert row.engine_logp == rollout.steps[0].logprobs
        assert sum(not is_hinted(r) for r in group.rollouts) >= 1
    plain = trainer_of(tmp_path / "b", None, rollout={"group_size": 2, "tasks_per_step": 6})
    want = {g.task.task_id: g for g in plain.step().groups}
    untouched = [g for g in report.groups if not any(map(is_hinted, g.rollouts))]
    assert untouched
    for group in untouched:  # a group with a success is as it was, to the last bit
        assert group.to_dict() == want[group.task.task_id].to_dict()


def drawn_of(trainer: Trainer, groups: Sequence[RolloutGroup]) -> list[Drawn]:
    """The graded rollouts as the distillation objectives read them."""
    found = []
    for number, group in enumerate(groups):
        bare = trainer._maker.prompter.ids(group.task)
        contexts: list[Any] = []
        for rollout in group.graded:
            row = row_of(rollout, index=len(found))
            if is_hinted(rollout) and row.prompt_ids not in contexts:
                contexts.append(row.prompt_ids)
            context = contexts.index(row.prompt_ids) if is_hinted(rollout) else -1
            assert rollout.score is not None
            reward = rollout.score.reward
            found.append(Drawn(row, replace(row, prompt_ids=bare), number, context, reward))
    return found


PASSES = PassSettings(micro_batch_tokens=4000)


def update_gradients(trainer: Trainer, rows: list[TrainRow], stale: frozenset[int]) -> Any:
    updater = trainer.updater
    updater.weights.clear()
    rows = updater._with_scores(rows, False, stale)
    settings = updater.settings
    accumulate(updater.model, rows, settings, updater._token_weights(rows, settings))
    return gradients(updater.model)


def test_nudge_in_the_trainer_has_the_gradient_of_its_objective(tmp_path: Path) -> None:
    trainer = trainer_of(
        tmp_path,
        {"name": "nudge", "per_context": 3, "dropout": 0.3, "distil": 0.4},
        loss={"advantage": "nudge", "advantage_options": {"lam": 0.3}},
    )
    groups = trainer._roller.roll(0).groups
    rows, stale = rows_of(trainer, groups)
    assert not stale and len(rows) == 2 * sum(len(g.graded) for g in groups)
    got = update_gradients(trainer, rows, stale)
    trainer.updater.weights.clear()
    settings = NudgeSettings(lam=0.3, distil=0.4)
    accumulate_nudge(trainer.updater.model, drawn_of(trainer, groups), settings, PASSES)
    assert_same_gradients(got, gradients(trainer.updater.model))


def test_icpo_in_the_trainer_has_the_gradient_of_its_objective(tmp_path: Path) -> None:
    section = {"name": "icpo", "expert": 2, "bonus": 0.3, "gamma": 0.2}
    trainer = trainer_of(tmp_path, section, rollout={"tasks_per_step": 6})
    groups = trainer._roller.roll(0).groups
    rows, stale = rows_of(trainer, groups)
    assert stale
    got = update_gradients(trainer, rows, stale)
    trainer.updater.weights.clear()
    settings = IcpoSettings(group_size=4, expert=2, bound=1.0, bonus=0.3, steps=100, gamma=0.2)
    accumulate_icpo(trainer.updater.model, drawn_of(trainer, groups), settings, PASSES, 0)
    assert_same_gradients(got, gradients(trainer.updater.model))
    assert isinstance(trainer._hints, Icpo)


def test_a_ratio_that_a_loss_does_not_have_is_refused(tmp_path: Path) -> None:
    for hints in ({"name": "lope"}, {"name": "icpo"}):
        with pytest.raises(ConfigError, match="which loss 'reinforce' does not have"):
            tiny_config(tmp_path, hints=hints, loss={"name": "reinforce"})
        with pytest.raises(ConfigError, match="samplers tell log-probs at temperature 1 only"):
            tiny_config(tmp_path, hints=hints, rollout={"temperature": 0.5})
    assert tiny_config(tmp_path, hints={"name": "lope", "condition": "original"})
    with pytest.raises(ConfigError, match=r"set loss\.advantage = 'nudge'"):
        tiny_config(tmp_path, hints={"name": "nudge"})


class Parity:
    """Says the parity of what was said, twice; a fresh world repeats what it said."""

    def __init__(self, task: Task) -> None:
        self.states = ["start"]

    async def act(self, action: Message) -> list[Message] | None:
        if len(self.states) == 3:
            return None
        self.states.append(f"{len(self.states)} {sum(map(ord, action.content)) % 2}")
        return [Message("user", self.states[-1])]

    def facts(self) -> dict[str, Any]:
        return {"state_keys": self.states}


def test_no_gradient_reaches_the_turns_before_the_retried_step_and_no_row_holds_guidance(
    tmp_path: Path,
) -> None:
    """R3L's rows, with reflections put in the place of what a random model would write."""
    trainer = trainer_of(
        tmp_path,
        {"name": "r3l", "full": 2.0},
        multi_turn={
            "environment": "tests.rl.rollouts.test_second_tries:Parity",
            "max_tokens": 120,
        },
        rollout={
            "max_tokens": 12,
            "group_size": 4,
            "tasks_per_step": 2,
            "stop": list("ACEGIKMOQSUWYacegikmoqsuwy"),  # so that turns end
        },
        loss={"advantage": "r3l", "advantage_options": {"r_max": 2.0}, "name": "opmd", "kl": 0.01},
    )
    r3l: Any = trainer._hints
    said = REFLECTION.replace("do say stop", "xyz")
    written = r3l._write

    def write(task: Task, key: str, rollout: Rollout) -> Any:
        ask = written(task, key, rollout)
        return replace(ask, prompt="ab", read=lambda reply, read=ask.read: read(said), max_tokens=3)

    r3l._write = write
    rolled = trainer._roller.roll(0)
    retries = [
        (g, r) for g in rolled.groups for r in g.rollouts if len(g.rollouts) > 1 and is_hinted(r)
    ]
    assert retries
    rows, _ = rows_of(trainer, rolled.groups)
    graded = [r for g in rolled.groups for r in g.graded]
    for group, retry in retries:
        row = next(r for r in rows if graded[r.row.index] is retry)
        bare = trainer._maker.prompter.ids(group.task)
        assert row.row.prompt_ids == bare and row.engine_logp is None
        replayed = len(retry.steps[0].token_ids or ())
        assert row.row.loss_positions is not None and min(row.row.loss_positions) >= replayed
        assert row.row.n_loss == sum(len(s.token_ids or ()) for s in retry.steps[1:])
    figures = trainer.step().figures
    assert np.isfinite(figures["loss"]) and figures["writes"] > 0


SECTIONS = [
    {"name": "sage", "rewrite": "visit", "success_above": 0.9, "max_level": 1, "writer_tokens": 4},
    {"name": "igrpo", "drafts": 2},
    {"name": "lope", "resamples": 4, "words": [2, 3], "shaping": 0.1, "whole_baseline": True},
    {"name": "nudge", "per_context": 2},
    {"name": "icpo", "expert": 2},
    {"name": "xrpo"},
    {"name": "scope", "writer_tokens": 4},
    {"name": "scaf", "graft": True},
]


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: str(s["name"]))
def test_a_stopped_run_goes_on_as_if_it_had_not_stopped(
    section: dict[str, Any], tmp_path: Path
) -> None:
    def made(folder: str) -> Trainer:
        loss = {"loss": {"advantage": "nudge"}} if section["name"] == "nudge" else {}
        rollout = {"group_size": 2, "tasks_per_step": 3}
        return trainer_of(tmp_path / folder, section, rollout=rollout, **loss)

    whole, first = made("whole"), made("cut")
    for _ in range(4):
        whole.step()
    for _ in range(2):
        first.step()
    first.save()
    second = made("cut")
    assert second.resume()
    for _ in range(2):
        second.step()
    assert fingerprint(second) == fingerprint(whole)
    assert second._hints is not None and whole._hints is not None
    assert json.loads(json.dumps(second._hints.state_dict())) == json.loads(
        json.dumps(whole._hints.state_dict())
    )
