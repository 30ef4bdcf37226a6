"""`tfgrpo train` as a program: kill it, run it again, and the model is the same bit by bit."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.cli.command_line import here
from tests.patience import PATIENCE_S
from tests.rl.tiny import tiny_hf
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.rl.checkpoints.files import sha256
from tfgrpo.rollout import Rollout, RolloutGroup, Score, Step, Task
from tfgrpo.store import write_groups

ROOT = Path(__file__).parents[2]


def write_model(folder: Path) -> None:
    """A tiny model with a real tokenizer, on disk."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = {"<pad>": 0, "<s>": 1, "</s>": 2, **{chr(62 + i): i for i in range(3, 64)}}
    core = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    core.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, pad_token="<pad>", eos_token="</s>")
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    tiny_hf().save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def write_run(place: Path, name: str) -> Path:
    tasks = [
        {"task_id": f"t{i}", "prompt": "abc" + chr(97 + i), "reference": "a"} for i in range(4)
    ]
    held = [{"task_id": f"h{i}", "prompt": "xyz" + chr(97 + i), "reference": "a"} for i in range(3)]
    for file, rows in (("tasks.jsonl", tasks), ("held.jsonl", held)):
        (place / file).write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = place / f"{name}.toml"
    config.write_text(
        f"""
[model]
lm = "local:{place / "model"}"
dtype = "float32"
[tasks]
path = "tasks.jsonl"
held_out = "held.jsonl"
[verifier]
kind = "regex"
pattern = "[a-m]"
[rollout]
tasks_per_step = 2
group_size = 4
max_tokens = 3
[optimiser]
steps = 6
lr = 1e-3
[run]
folder = "{place / name}"
save_every = 1
"""
    )
    return config


def command(config: Path) -> list[str]:
    return [sys.executable, "-m", "tfgrpo", "train", str(config)]


@pytest.mark.real
def test_a_killed_run_goes_on_to_the_same_bits(tmp_path) -> None:
    write_model(tmp_path / "model")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    options = {"cwd": ROOT, "env": environment, "stdout": subprocess.PIPE, "text": True}
    whole = subprocess.run(command(write_run(tmp_path, "whole")), **options, timeout=PATIENCE_S)
    assert whole.returncode == 0
    assert "held-out mean reward" in whole.stdout and "step 6/6:" in whole.stdout

    config = write_run(tmp_path, "cut")
    process = subprocess.Popen(command(config), **options)
    checkpoints = tmp_path / "cut" / "checkpoints"
    end = time.monotonic() + 90
    while not list(checkpoints.glob("step-*")) and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not (tmp_path / "cut" / "model").exists()
    again = subprocess.run(command(config), **options, timeout=PATIENCE_S)
    assert again.returncode == 0 and "step 1/6:" not in again.stdout
    for name in ("model.safetensors", "README.md"):
        assert (tmp_path / "cut" / "model" / name).exists()
    digests = {sha256(tmp_path / n / "model" / "model.safetensors") for n in ("whole", "cut")}
    assert len(digests) == 1
    states = {
        sha256(tmp_path / n / "checkpoints" / "step-000006" / "optimiser.safetensors")
        for n in ("whole", "cut")
    }
    assert len(states) == 1


def test_no_task_file_is_one_clear_line() -> None:
    from tfgrpo import rl

    with pytest.raises(ConfigError, match=r"tasks\.path is empty"):
        rl.train(rl.TrainConfig())
    with pytest.raises(ConfigError, match="pass the allocator as train"):
        rl.train(rl.TrainConfig(curriculum={"allocate": "sgpo"}))


def test_a_model_that_is_not_local_is_refused() -> None:
    from tfgrpo.rl import load_parts

    with pytest.raises(ConfigError, match="training needs the weights"):
        load_parts("openai:gpt-5")


def test_loading_weights_draws_nothing_and_leaves_progress_bars_as_they_were(tmp_path, capfd):
    from transformers.utils import logging as progress

    from tfgrpo.lm.local.loading import load_model

    write_model(tmp_path)
    capfd.readouterr()
    progress.enable_progress_bar()
    load_model(str(tmp_path), device="cpu")
    assert "Loading" not in capfd.readouterr().err
    assert progress.is_progress_bar_enabled()


@pytest.mark.real
def test_a_judge_of_a_training_run_is_kept_priced_and_capped(tmp_path) -> None:
    from tfgrpo import rl
    from tfgrpo.errors import BudgetError
    from tfgrpo.store import Budget, Journal
    from tfgrpo.testing import FaultServer, say

    write_model(tmp_path / "model")
    text = write_run(tmp_path, "judged").read_text()
    rubric = 'kind = "judge"\nrubric = "right"\nlm = "{spec}"\n'
    with FaultServer(lambda call: say(f"Score: {40 + call.index}")) as server:
        text = text.replace(
            'kind = "regex"\npattern = "[a-m]"\n', rubric.format(spec=server.spec())
        )
        money = text + "\n[budget]\ncost_usd = 1.0\n"
        (tmp_path / "judged.toml").write_text(money)
        with pytest.raises(ConfigError, match=r"price of .* is unknown"):
            rl.train(rl.TrainConfig.from_toml(tmp_path / "judged.toml"))
        (tmp_path / "judged.toml").write_text(text + "\n[budget]\ncalls = 21\n")
        with pytest.raises(BudgetError, match="calls"):
            rl.train(rl.TrainConfig.from_toml(tmp_path / "judged.toml"))
        assert server.call_count <= 21
        with Journal.open(tmp_path / "judged" / "judge", budget=Budget(calls=21)) as store:
            assert store.ledger.spent["calls"] == server.call_count


@pytest.mark.parametrize(
    ("sets", "made"),
    [
        (["rollout.strategy=latr"], 8),
        (["rollout.strategy=tree", "rollout.strategy_options.factors=[2, 2]"], 8),
        (["rollout.strategy=spo_chain", "credit.name=spo_chain"], 8),
        (["rollout.strategy=echo"], 8),
        (["rollout.strategy=april"], 8),
        (["curriculum.allocate=top_up", "loss.advantage=shrunk"], 8),
        (["curriculum.select=rorecomp", "curriculum.refill=1", "curriculum.replay=1"], 8),
        (["tasks.path=", "tasks.groups=saved.jsonl", "credit.name=portool"], 0),
    ],
)
def test_every_way_to_make_a_steps_groups_is_reached_from_the_command(
    sets: list[str], made: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """`made` rollouts a step, exactly: two groups of four, or saved ones."""
    write_model(tmp_path / "model")
    config = write_run(tmp_path, "run")
    task = Task("s", "abc")
    saved = [
        Rollout(f"r{i}", "s", (Step(Message("assistant", text)),), sample_index=i).graded(Score(r))
        for i, (text, r) in enumerate((("ab", 1.0), ("cd", 0.0)))
    ]
    write_groups(tmp_path / "saved.jsonl", [RolloutGroup("g", task, tuple(saved))])
    options = [x for s in ("optimiser.steps=2", *sets) for x in ("--set", s)]
    ran = here(capsys, "train", str(config), *options)
    assert ran.code == 0, ran.err
    assert "step 2/2:" in ran.out and "held-out mean reward" in ran.out
    rows = [json.loads(r) for r in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [r["rollouts"] for r in rows] == [made, made]


def test_a_step_says_what_is_left_and_what_keeps_it_from_teaching(
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("torch")
    from types import SimpleNamespace

    from tfgrpo.cli.train import StepLines
    from tfgrpo.rl.config import TrainConfig

    settings = TrainConfig.from_mapping({"optimiser": {"steps": 3}, "rollout": {"max_tokens": 16}})
    lines = StepLines(settings)
    figures = {
        "reward_mean": 0.1, "informative_share": 0.0, "grad_norm": 0.0, "seconds": 45.0,
        "rollout_seconds": 40.0, "samples_per_s": 0.4, "truncated_share": 1.0,
    }  # fmt: skip
    for step in (1, 2, 3):
        lines(SimpleNamespace(step=step, figures=figures))
    out = capsys.readouterr().out
    assert "step 1/3:" in out and "about 1 min 30 s left" in out
    assert out.count("100% of the replies were cut at rollout.max_tokens = 16") == 1
    assert out.count("no group differs in reward, so this step moves no weight") == 1
    assert out.count("so 3 steps in a row move no weight") == 1
    assert "left" not in next(x for x in out.splitlines() if x.startswith("step 3/3"))
