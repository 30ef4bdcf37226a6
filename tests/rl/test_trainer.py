"""The loop: it learns, it resumes bit by bit, it refuses bad input in one clear line."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.rl.tiny import CharTokenizer, EvenTokens, tiny_config, tiny_hf, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError, ProviderError, StoreError, VerifierError
from tfgrpo.hint_plan import BARE, HintPlan
from tfgrpo.rl import distributed
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.config import TrainConfig
from tfgrpo.rl.run_state import identity_of
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Rollout, Score, Task


def make(config: TrainConfig, verifier=None, parts=None, **options) -> Trainer:
    return Trainer(config, parts or tiny_parts(), tiny_tasks(), verifier or EvenTokens(), **options)


def fingerprint(trainer: Trainer) -> dict[str, str]:
    return {n: checkpoint.bits(t) for n, t in trainer.optimiser.state()}


def metrics(folder) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def comparable(row: dict) -> dict:
    """A step's figures without timings."""
    timings = {"seconds", "samples_per_s", "floor_share"}
    of_machine = ("_seconds", "_tb_s", "_tflop_s")
    return {k: v for k, v in row.items() if k not in timings and not k.endswith(of_machine)}


@pytest.mark.real
def test_reward_rises(tmp_path) -> None:
    config = tiny_config(
        tmp_path,
        rollout={"tasks_per_step": 6, "group_size": 8},
        optimiser={"steps": 25, "lr": 5e-3},
        run={"save_every": 100},
    )
    make(config).train()
    rewards = [row["reward_mean"] for row in metrics(tmp_path)]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:3]) / 3 + 0.3


@pytest.mark.parametrize(
    "extra",
    [
        {},
        pytest.param({"loss": {"kl": 0.05}}, marks=pytest.mark.real),
        pytest.param({"model": {"lora_rank": 2}}, marks=pytest.mark.real),
        pytest.param({"optimiser": {"moments": "bfloat16"}}, marks=pytest.mark.real),
    ],
)
def test_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(tmp_path, extra) -> None:
    if "loss" in extra:
        extra = {**extra, "optimiser": {"epochs_per_batch": 2, "updates_per_epoch": 3}}
    whole = make(tiny_config(tmp_path / "whole", run={"folder": str(tmp_path / "whole")}, **extra))
    whole.train()

    folder = tmp_path / "cut"
    first = make(tiny_config(folder, **extra))
    while first.step_number < 2:
        first._write(first.step())
    first.save()
    first._write(first.step())  # a step that is lost with the process
    second = make(tiny_config(folder, **extra))
    second.train()

    assert second.step_number == whole.step_number == 4
    assert fingerprint(second) == fingerprint(whole)
    assert list(map(comparable, metrics(folder))) == list(
        map(comparable, metrics(tmp_path / "whole"))
    )
    ids = [[r.steps[0].token_ids for r in g.rollouts] for g in second.step().groups]
    assert ids == [[r.steps[0].token_ids for r in g.rollouts] for g in whole.step().groups]


def test_a_checkpoint_loads_as_a_hugging_face_model(tmp_path) -> None:
    from transformers import AutoModelForCausalLM

    trainer = make(tiny_config(tmp_path, optimiser={"steps": 1}, run={"save_every": 1}))
    trainer.train()
    path = checkpoint.found(tmp_path / "checkpoints")[-1]
    model = AutoModelForCausalLM.from_pretrained(path)
    weights = checkpoint.model_weights(trainer._model.decoder)
    for name, value in model.state_dict().items():
        if name in weights:
            assert torch.equal(value, weights[name]), name
    assert sorted(p.suffix for p in path.iterdir()) == [".json"] * 2 + [".safetensors"] * 2


def test_a_damaged_checkpoint_is_refused(tmp_path) -> None:
    make(tiny_config(tmp_path, optimiser={"steps": 2})).train()
    path = checkpoint.found(tmp_path / "checkpoints")[-1] / checkpoint.WEIGHTS
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(StoreError, match=r"model\.safetensors is damaged"):
        make(tiny_config(tmp_path, optimiser={"steps": 2})).resume()


def test_a_run_with_other_settings_is_not_resumed(tmp_path) -> None:
    make(tiny_config(tmp_path, optimiser={"steps": 2})).train()
    with pytest.raises(StoreError, match="other settings"):
        make(tiny_config(tmp_path, optimiser={"steps": 2, "lr": 1e-3})).resume()


def test_shards_of_other_hosts_are_not_resumed(tmp_path, monkeypatch) -> None:
    """As many processes on fewer hosts hold smaller shards; whole weights do not mind."""

    def identities(shard: bool) -> set[str]:
        config, found = tiny_config(tmp_path, model={"shard": shard}), set()
        for n in (1, 2):
            monkeypatch.setattr(distributed, "hosts", lambda n=n: n)
            found.add(identity_of(config, tiny_tasks()))
        return found

    assert len(identities(shard=True)) == 2 and len(identities(shard=False)) == 1


def test_a_failed_write_leaves_older_checkpoints_whole(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path))
    trainer.step()
    trainer.save()

    def refuse(folder):
        raise OSError(28, "No space left on device")

    with pytest.raises(StoreError, match="No space left"):
        checkpoint.save(tmp_path / "checkpoints", 9, {}, {}, refuse)
    assert [p.name for p in (tmp_path / "checkpoints").iterdir()] == ["step-000001"]
    checkpoint.load(tmp_path / "checkpoints" / "step-000001")


def test_old_checkpoints_are_dropped(tmp_path) -> None:
    make(tiny_config(tmp_path, run={"save_every": 1, "keep": 2})).train()
    names = [p.name for p in checkpoint.found(tmp_path / "checkpoints")]
    assert names == ["step-000003", "step-000004"]


def spacing(x: torch.Tensor) -> torch.Tensor:
    """From each bfloat16 number to the next larger one in size."""
    return ((x.view(torch.int16) + 1).view(torch.bfloat16).float() - x.float()).abs()


def test_a_model_loaded_in_another_type_than_the_settings_ask_is_refused(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, model={"dtype": "float32"})
    assert make(config, parts=tiny_parts()).step_number == 0
    with pytest.raises(
        ConfigError, match=r"model\.dtype is 'float32' and the model given has bflo"
    ):
        make(config, parts=tiny_parts(dtype=torch.bfloat16))
    with pytest.raises(ConfigError, match=r"model\.device is 'cuda' and the model given has cpu"):
        make(tiny_config(tmp_path, model={"device": "cuda"}), parts=tiny_parts())


def test_bfloat16_weights_are_rounded_masters(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path), parts=tiny_parts(dtype=torch.bfloat16))
    trainer.step()
    masters = trainer.updater.weights.masters()
    for name, parameter in trainer._model.decoder.named_parameters():
        assert parameter.dtype == torch.bfloat16
        master = masters[name].value()
        assert master.dtype == torch.float32
        assert not torch.equal(parameter.float(), master)
        assert torch.all((parameter.float() - master).abs() <= spacing(parameter) / 2)


@pytest.mark.parametrize("rank", [0, 2])
def test_what_others_write_to_the_sums_memory_between_updates_trains_nothing(
    tmp_path, rank
) -> None:
    found = []
    for name in ("clean", "used"):
        config = tiny_config(tmp_path / name, model={"lora_rank": rank})
        trainer = make(config, parts=tiny_parts(dtype=torch.bfloat16))
        memory = trainer.updater.weights.spare()
        assert memory.numel() > 1000
        for _ in range(2):
            if name == "used":
                memory.fill_(float("nan"))
            trainer.step()
        found.append(fingerprint(trainer))
    assert found[0] == found[1]


def test_a_small_rate_moves_masters_that_bfloat16_would_not(tmp_path) -> None:
    trainer = make(
        tiny_config(tmp_path, optimiser={"lr": 1e-6}), parts=tiny_parts(dtype=torch.bfloat16)
    )
    before = {n: m.value().clone() for n, m in trainer.updater.weights.masters().items()}
    seen = {n: p.detach().clone() for n, p in trainer._model.decoder.named_parameters()}
    trainer.step()
    moved = [
        (m.value() != before[n]).float().mean().item()
        for n, m in trainer.updater.weights.masters().items()
    ]
    rounded = [
        (p != seen[n]).float().mean().item() for n, p in trainer._model.decoder.named_parameters()
    ]
    assert min(moved) > 0.5
    assert sum(rounded) / len(rounded) < 0.2


class Raises(EvenTokens):
    async def score(self, rollout, task):
        raise KeyError("gold")


class Nan(EvenTokens):
    async def score(self, rollout, task):
        return Score(float("nan"))


class Equal(EvenTokens):
    async def score(self, rollout, task):
        return Score(1.0)


@pytest.mark.parametrize(("verifier", "cause"), [(Raises(), "gold"), (Nan(), "nan")])
def test_nothing_graded_stops_with_the_cause(tmp_path, verifier, cause) -> None:
    trainer = make(tiny_config(tmp_path), verifier)
    before = fingerprint(trainer)
    with pytest.raises(VerifierError, match=rf"step 1: none of the rollouts.*{cause}"):
        trainer.train()
    assert fingerprint(trainer) == before
    assert checkpoint.found(tmp_path / "checkpoints") == []


def test_steps_that_move_nothing_are_told_at_the_fifth_and_each_doubling(tmp_path, caplog) -> None:
    trainer = make(tiny_config(tmp_path), Equal())
    with caplog.at_level("WARNING", "tfgrpo.rl.trainer"):
        for _ in range(11):
            trainer.step()
    told = [r.getMessage() for r in caplog.records if "moved no weight" in r.getMessage()]
    assert [t.partition(":")[0] for t in told] == ["step 5", "step 10"]
    assert all("because the rewards within every group are equal" in t for t in told)
    learning = make(tiny_config(tmp_path / "other"))
    caplog.clear()
    for _ in range(5):
        learning.step()
    assert "moved no weight" not in caplog.text


def test_a_loss_that_makes_nothing_of_the_rewards_is_told_as_that(tmp_path, caplog) -> None:
    loss = {"name": "drpo", "options": {"right": 2.0, "beta": 0.0}}  # no reward is that high
    trainer = make(tiny_config(tmp_path, loss=loss))
    for _ in range(5):
        trainer.step()
    assert "moved no weight" in caplog.text and "although rewards differ" in caplog.text


def test_all_equal_groups_are_skipped_and_move_nothing(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path), Equal())
    before = fingerprint(trainer)
    report = trainer.step()
    assert report.figures["trained_tokens"] == 0
    assert report.figures["skipped_tokens"] == report.figures["completion_tokens"] > 0
    assert report.figures["informative_share"] == 0
    assert report.figures["grad_norm"] == 0
    assert {k: v for k, v in fingerprint(trainer).items() if k.startswith("master")} == {
        k: v for k, v in before.items() if k.startswith("master")
    }


@pytest.mark.parametrize("loss", ["clip", "rpo"])
def test_momentum_moves_nothing_in_a_step_without_a_gradient(tmp_path, loss) -> None:
    """Also where the loss looks at every row."""
    trainer = make(tiny_config(tmp_path, loss={"name": loss}))
    trainer.step()
    before = fingerprint(trainer)
    equal = make(tiny_config(tmp_path / "equal"), Equal())
    rows = equal._row_maker.rows(equal._roller.roll(1).groups, 1)[0]
    trainer.updater.update([replace(r, engine_logp=None) for r in rows], 1)
    assert fingerprint(trainer) == before


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(
    tmp_path, monkeypatch
) -> None:
    trainer = make(tiny_config(tmp_path))
    monkeypatch.setattr(
        "tfgrpo.rl.update.train_rows.estimate", lambda b, *_: (b, np.full(12, np.inf))
    )
    before = fingerprint(trainer)
    with pytest.raises(ConfigError, match="gradient's norm is"):
        trainer.train()
    assert fingerprint(trainer) == before
    assert checkpoint.found(tmp_path / "checkpoints") == []


def test_a_tokenizer_without_a_chat_template_is_named(tmp_path) -> None:
    parts = tiny_parts()
    parts.tokenizer.chat_template = None
    with pytest.raises(ConfigError, match=r"model\.template = 'plain'"):
        make(tiny_config(tmp_path), parts=parts)
    trainer = make(tiny_config(tmp_path, model={"template": "plain"}), parts=parts)
    assert trainer.step().figures["completion_tokens"] > 0


def test_a_prompt_longer_than_the_context_names_its_task(tmp_path) -> None:
    from tfgrpo.rollout import Task

    tasks = [Task("long", "x" * 500)]
    trainer = Trainer(tiny_config(tmp_path), tiny_parts(), tasks, EvenTokens())
    with pytest.raises(ConfigError, match="task 'long': its prompt has 502 tokens"):
        trainer.train()


def test_engine_numbers_that_differ_stop_training(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path))
    other = tiny_parts(seed=9)
    stale = make(tiny_config(tmp_path / "other"), parts=other)
    trainer._maker.generator = stale.generator  # weights that were never synced
    with pytest.raises(ConfigError, match="differ from the trainer's"):
        trainer.step()


def test_generator_and_trainer_agree_where_the_gate_stands(tmp_path) -> None:
    figures = make(tiny_config(tmp_path)).step().figures
    assert figures["mismatch_mean"] < 1e-5


def test_held_out_tasks_may_not_be_training_tasks(tmp_path) -> None:
    with pytest.raises(ConfigError, match="held-out tasks are training tasks"):
        make(tiny_config(tmp_path), held_out=tiny_tasks(2))


def test_held_out_evaluation_has_an_interval_and_sees_no_hint(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path), held_out=tiny_tasks(5, "h"), hints=OneHint())
    found = trainer.evaluate()
    assert found["low"] <= found["mean"] <= found["high"]
    assert found["tasks"] == 5
    assert trainer._hints.asked == []


class OneHint:
    """Hints every failed task once."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.epochs = 0

    def start(self, task, group_size):
        return [BARE]

    def after(self, task, made):
        if len(made) > 1:
            return []
        self.asked.append(task.task_id)
        return [HintPlan(text="use even ones", level=1, source="teacher")]

    def accept(self, task, made):
        return made[-1].group

    def figures(self):
        return {"asked": float(len(self.asked))}

    def epoch_end(self):
        self.epochs += 1

    def state_dict(self):
        return {"asked": self.asked, "epochs": self.epochs}

    def load_state_dict(self, state):
        self.asked, self.epochs = list(state["asked"]), state["epochs"]


def test_a_hinted_group_has_one_context_and_is_trained_under_it(tmp_path) -> None:
    hints = OneHint()
    trainer = make(tiny_config(tmp_path), hints=hints)
    report = trainer.step()
    assert sorted(hints.asked) == sorted(g.task.task_id for g in report.groups)
    for group in report.groups:
        assert [p.text for p in group.context.of_kind("hint")] == ["use even ones"]
        prompts = {r.steps[0].prompt_token_ids for r in group.rollouts}
        assert len(prompts) == 1
        bare = trainer._maker.prompter.ids(group.task)
        assert len(prompts.pop()) > len(bare)
    assert report.figures["hinted_rollouts"] == 3 * 4
    assert report.figures["groups_hint:teacher:1"] == 3
    assert report.figures["hints_asked"] == 3


def test_reliance_is_the_gain_in_log_prob_that_the_hint_gave(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path), hints=OneHint())
    model = tiny_hf()
    report = trainer.step()

    def logp(prompt, ids):
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *ids]])).logits[0].log_softmax(-1)
        return [logits[len(prompt) - 1 + i, t].item() for i, t in enumerate(ids)]

    gains = []
    for group in report.groups:
        for step in (r.steps[0] for r in group.rollouts):
            hinted = logp(step.prompt_token_ids, step.token_ids)
            bare = logp(trainer._prompter.ids(group.task), step.token_ids)
            gains.append(np.mean(np.subtract(hinted, bare)))
    assert report.figures["hints_reliance"] == pytest.approx(np.mean(gains), abs=1e-4)
    assert "hints_reliance" not in make(tiny_config(tmp_path / "bare")).step().figures


def test_hint_state_survives_a_resume(tmp_path) -> None:
    first = make(tiny_config(tmp_path), hints=OneHint())
    while first.step_number < 2:
        first.step()
    first.save()
    second = make(tiny_config(tmp_path), hints=OneHint())
    second.resume()
    assert second._hints.state_dict() == first._hints.state_dict()
    assert second._hints.epochs == 1


def test_each_epoch_visits_every_task_once_in_a_new_order(tmp_path) -> None:
    drawn = make(tiny_config(tmp_path)).curriculum
    epochs = [[d.task.task_id for _ in range(2) for d in drawn.draw(3)] for _ in range(3)]
    assert drawn.epoch == 3
    for order in epochs:
        assert sorted(order) == [f"t{i}" for i in range(6)]
    assert epochs[0] != epochs[1] or epochs[1] != epochs[2]


def test_truncated_replies_can_be_left_out(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path, rollout={"on_truncated": "exclude", "max_tokens": 30}))
    report = trainer.step()
    for group in report.groups:
        for rollout in group.rollouts:
            assert (rollout.outcome == "truncated") == rollout.is_truncated
    assert report.figures["graded_share"] < 1


def test_wrong_settings_are_named_with_the_nearest_right_one() -> None:
    with pytest.raises(ConfigError, match="did you mean 'group_size'"):
        TrainConfig.from_mapping({"rollout": {"groupsize": 4}})
    with pytest.raises(ConfigError, match="no loss 'clipp'; did you mean 'clip'"):
        TrainConfig.from_mapping({"loss": {"name": "clipp"}})
    with pytest.raises(ConfigError, match=r"rollout\.top_p is 0\.9"):
        TrainConfig.from_mapping({"rollout": {"top_p": 0.9}})


def test_memory_that_runs_out_names_the_settings(tmp_path, monkeypatch) -> None:
    trainer = make(tiny_config(tmp_path))

    def explode(*_):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(trainer.updater, "update", explode)
    with pytest.raises(ConfigError, match=r"step 1: .* lower optimiser\.micro_batch_tokens"):
        trainer.step()
    monkeypatch.setattr(trainer._maker, "make", lambda *_, **__: explode())
    with pytest.raises(ConfigError, match=r"lower rollout\.max_rows or rollout\.max_tokens"):
        trainer.step()


def test_tokenizer_and_model_are_the_ones_given() -> None:
    assert CharTokenizer().decode([3, 2], skip_special_tokens=True) == "@"
    assert tiny_hf().config.num_hidden_layers == 2


def test_an_estimator_may_return_one_advantage_a_token(tmp_path, monkeypatch) -> None:
    trainer = make(tiny_config(tmp_path))
    groups = trainer._roller.roll(0).groups
    lengths = [len(r.steps[0].token_ids) for g in groups for r in g.rollouts]
    per_token = np.arange(float(sum(lengths)))
    monkeypatch.setattr("tfgrpo.rl.update.train_rows.estimate", lambda b, *_: (b, per_token))
    rows, _ = trainer._row_maker.rows(groups, 0)
    assert [len(r.advantage) for r in rows] == lengths
    assert [a for r in rows for a in r.advantage] == list(range(sum(lengths)))
    monkeypatch.setattr("tfgrpo.rl.update.train_rows.estimate", lambda b, *_: (b, np.zeros(5)))
    with pytest.raises(ConfigError, match="returned 5 advantages for 12 rollouts"):
        trainer._row_maker.rows(groups, 0)


class Unreachable(EvenTokens):
    """A judge behind a provider that fails for one reply in four, in the way given."""

    def __init__(self, kind: str) -> None:
        self._kind, self._calls = kind, 0

    async def score(self, rollout: Rollout, task: Task) -> Score:
        self._calls += 1
        if self._calls % 4 == 0:
            raise ProviderError("the judge's LM answered 401", kind=self._kind)
        return await super().score(rollout, task)


@pytest.mark.parametrize("kind", ["auth", "quota", "rate_limit", "connection"])
def test_a_providers_failure_inside_a_verifier_ends_no_training_step(
    tmp_path: Path, kind: str
) -> None:
    report = make(tiny_config(tmp_path), verifier=Unreachable(kind)).step()
    outcomes = Counter(r.outcome for g in report.groups for r in g.rollouts)
    assert outcomes == {"graded": 9, "verifier_failed": 3}
    failed = [r for g in report.groups for r in g.rollouts if r.score is None]
    assert all("answered 401" in r.error for r in failed)
    assert report.figures["rows"] == 9


def weights_of(trainer: Trainer) -> dict[str, str]:
    return {n: checkpoint.bits(p) for n, p in trainer._model.decoder.named_parameters()}


def cut_config(folder: Path, **rollout) -> TrainConfig:
    """Replies never end by themselves and are left out where they are cut."""
    always = {"ignore_eos": True, "on_truncated": "exclude", "max_skipped_steps": 3}
    return tiny_config(folder, rollout=always | rollout)


def test_a_step_whose_every_reply_is_cut_moves_nothing_and_is_counted(tmp_path, caplog) -> None:
    trainer = make(cut_config(tmp_path))
    before, moments = weights_of(trainer), fingerprint(trainer)
    with caplog.at_level("WARNING", "tfgrpo.rl.trainer"):
        reports = [trainer.step() for _ in range(2)]
    assert weights_of(trainer) == before and fingerprint(trainer) == moments
    assert [r.figures["skipped_steps"] for r in reports] == [1, 2]
    assert all(r.figures["truncated_share"] == 1.0 for r in reports)
    told = [r.getMessage() for r in caplog.records]
    assert len(told) == 2 and "step 1: 100 % of the replies were cut" in told[0]
    with pytest.raises(ConfigError, match=r"3 in a row\); raise it, which a resumed run may do"):
        trainer.step()


def test_the_advice_after_cut_replies_may_be_followed_on_resume(tmp_path) -> None:
    """A run that was skipping goes on with longer replies, the count of skipped steps with it."""
    first = make(cut_config(tmp_path))
    first.step()
    first.save()
    second = make(cut_config(tmp_path, max_tokens=12, max_skipped_steps=9))
    assert second.resume() and second._skipped == 1
    assert second.step().figures["skipped_steps"] == 2
    graded = make(cut_config(tmp_path, max_tokens=12, ignore_eos=False))
    with pytest.raises(StoreError, match="other settings"):
        graded.resume()


class Sometimes(EvenTokens):
    """Fails for the first `n` of each four replies."""

    def __init__(self, n: int) -> None:
        self._n = n

    async def score(self, rollout: Rollout, task: Task) -> Score:
        if rollout.sample_index < self._n:
            raise RuntimeError("the sandbox is gone")
        return await super().score(rollout, task)


def test_a_run_stops_with_the_first_cause_where_most_replies_cannot_be_scored(tmp_path) -> None:
    half = make(tiny_config(tmp_path), verifier=Sometimes(2)).step()
    assert half.figures["unscored_share"] == 0.5
    with pytest.raises(VerifierError, match=r"only 25% of the rollouts .* the sandbox is gone"):
        make(tiny_config(tmp_path), verifier=Sometimes(3)).step()
    lax = tiny_config(tmp_path, rollout={"max_unscored_share": 0.75})
    assert make(lax, verifier=Sometimes(3)).step().figures["unscored_share"] == 0.75
