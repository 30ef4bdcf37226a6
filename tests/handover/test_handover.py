"""Finished runs in the forms of other trainers: every file read by the trainer's own loader where
it is installed, every reward asked of the run's own verifier, no test task in any file."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from tests.cli.command_line import here
from tfgrpo import Config, FunctionPolicy, Task, learn
from tfgrpo.errors import ConfigError
from tfgrpo.escalate.run_data import read_material
from tfgrpo.handover import TARGETS, RunVerifier, hand_over, read_bundle
from tfgrpo.messages import Message, ToolCall
from tfgrpo.runtime.import_string import add_module_folder

FUNCTION = {"kind": "function", "function": "good_letters:score"}


def agent(prompt: str, context: Any, seed: int = 0) -> str:
    """Right with examples, seldom without."""
    right = prompt.rsplit(" ", 1)[-1]
    return right if context.parts or seed % 4 == 0 else "zz"


def tasks() -> list[Task]:
    said = [(f"t{i}", chr(97 + i) * 2) for i in range(18)]
    return [Task(i, f"say {w}", reference=w, metadata={"hints": [f"it is {w}"]}) for i, w in said]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that kept two exemplars, judged by a function of a module beside it."""
    add_module_folder(Path(__file__).parent)
    folder = tmp_path_factory.mktemp("handover") / "my run"
    config = Config.from_mapping({
        "run": {"folder": str(folder), "on_truncated": "grade"},
        "policy": {"lm": "openai:none", "system": "Say it."},
        "verifier": FUNCTION,
        "learn": {"batch": 6, "group_size": 4, "entries": "exemplars",
                  "settings": {"exemplars": 2}},
        "gate": {"group_size": 4, "test_group_size": 3},
    })  # fmt: skip
    learn(config, tasks=tasks(), policy=FunctionPolicy(agent, policy_id="agent"))
    return folder


@pytest.fixture(params=sorted(TARGETS))
def written(request: pytest.FixtureRequest, run: Path, tmp_path: Path) -> tuple[str, Path]:
    """The run for each trainer."""
    return request.param, hand_over(read_bundle(run), request.param, tmp_path / "out")


def module_of(path: Path, name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def on_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path / "out"))
    yield tmp_path / "out"
    sys.modules.pop("tfgrpo_my_run", None)


def test_no_file_holds_a_test_task_and_training_rows_are_practice_alone(
    written: tuple[str, Path], run: Path
) -> None:
    material = read_material(run)
    held_back = {f"say {t.reference}" for t in material.test}
    _, root = written
    files = [path for path in root.rglob("*") if path.is_file()]
    assert len(files) >= 6
    for path in files:
        content = path.read_bytes()
        assert not [words for words in held_back if words.encode() in content], path
    kept = {json.loads(line)["task_id"] for line in next(root.rglob("tasks.jsonl")).open()}
    assert kept == {t.task_id for t in (*material.practice, *material.gate)}
    card = (root / "README.md").read_text()
    assert "held back | 6 test tasks" in card and material.version_id in card


def test_rewards_are_the_runs_own(written: tuple[str, Path], run: Path) -> None:
    _, root = written
    verifier = RunVerifier.load(next(root.rglob("verifier.json")).parent)
    task = read_material(run).practice[0]
    word = str(task.reference)
    assert [verifier.score(task.task_id, r) for r in (word, word[0] + "!", "?")] == [1.0, 0.5, 0.0]

    async def inside() -> list[float | None]:
        return [await verifier.score_async(task.task_id, word), verifier.score(task.task_id, "?")]

    assert asyncio.run(inside()) == [1.0, 0.0]


def test_supervised_rows_are_verified_replies_with_and_without_the_library(
    written: tuple[str, Path], run: Path
) -> None:
    _, root = written
    rows = [
        json.loads(line) for line in next(root.rglob("verified.jsonl")).read_text().splitlines()
    ]
    practice = {t.task_id: t for t in read_material(run).practice}
    assert {r["form"] for r in rows} == {"bare", "library"}
    for row in rows:
        assert row["messages"][-1] == {
            "role": "assistant", "content": practice[row["task_id"]].reference
        }  # fmt: skip
        assert row["messages"][0]["content"].startswith("Say it.")
        assert len(row["messages"]) == 3 or row["form"] == "library"


def test_full_marks_are_the_verifiers_not_the_best_that_was_seen(run: Path) -> None:
    bundle = read_bundle(run)
    assert bundle.verified(2.0) == []
    assert {reply for _, reply in bundle.verified(1.0)} <= {
        task.reference for task in read_material(run).practice
    }
    assert len(bundle.verified(1.0)) == 6


def test_prompts_are_those_of_practice_or_bare(run: Path) -> None:
    full, bare = read_bundle(run), read_bundle(run, library=False)
    assert full.with_library and not bare.with_library
    task_id = full.rows[0].task.task_id
    assert [t["role"] for t in bare.rows[0].turns] == ["system", "user"]
    own = next(r for r in full.rows if r.task.task_id == task_id)
    assert len(own.turns) > 2 and own.turns[-1] == bare.rows[0].turns[-1]
    assert own.hints == [f"it is {own.task.reference}"]


def test_trl_reads_its_files(run: Path, tmp_path: Path, on_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    hand_over(read_bundle(run), "trl", on_path)
    files = {"train": str(on_path / "train.jsonl"), "validation": str(on_path / "validation.jsonl")}
    data = datasets.load_dataset("json", data_files=files, cache_dir=str(tmp_path / "cache"))
    row = data["train"][0]
    assert len(data["train"]) == len(data["validation"]) == 6
    reward = module_of(on_path / "reward.py", "trl_reward").reward
    word = row["prompt"][-1]["content"].rsplit(" ", 1)[-1]
    said = [[{"role": "assistant", "content": word}], [{"role": "assistant", "content": "?"}]]
    columns = {"task_id": [row["task_id"]] * 2, "hints": [row["hints"]] * 2}
    assert reward(prompts=[row["prompt"]] * 2, completions=said, **columns) == [1.0, 0.0]


@pytest.mark.real
@pytest.mark.filterwarnings("ignore")  # of transformers, for what TRL sets
def test_trl_trains_on_them(run: Path, tmp_path: Path, on_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    from tests.escalate.made import write_model

    hand_over(read_bundle(run, library=False), "trl", on_path)
    reward = module_of(on_path / "reward.py", "trl_reward").reward
    data = datasets.load_dataset(
        "json", data_files=str(on_path / "train.jsonl"), cache_dir=str(tmp_path / "cache")
    )["train"]
    settings = trl.GRPOConfig(
        output_dir=str(tmp_path / "trained"), num_generations=2, per_device_train_batch_size=2,
        max_completion_length=2, max_steps=1, report_to=[], use_cpu=True, bf16=False,
        disable_tqdm=True, save_strategy="no",
    )  # fmt: skip
    trainer = trl.GRPOTrainer(
        model=str(write_model(tmp_path / "model")),
        reward_funcs=reward, args=settings, train_dataset=data,
    )  # fmt: skip
    trainer.train()
    assert trainer.state.global_step == 1
    assert "rewards/reward/mean" in trainer.state.log_history[0]


@pytest.mark.real
def test_verl_reads_its_files(run: Path, tmp_path: Path, on_path: Path) -> None:
    rl_dataset = pytest.importorskip("verl.utils.dataset.rl_dataset", exc_type=ImportError)
    omegaconf = pytest.importorskip("omegaconf")
    from transformers import AutoTokenizer

    from tests.escalate.made import write_model

    hand_over(read_bundle(run), "verl", on_path)
    tokenizer = AutoTokenizer.from_pretrained(str(write_model(tmp_path / "model")))
    config = omegaconf.OmegaConf.create({
        "cache_dir": str(tmp_path / "cache"), "prompt_key": "prompt", "max_prompt_length": 4096,
        "filter_overlong_prompts_workers": 1, "return_raw_chat": True,
    })  # fmt: skip
    data = rl_dataset.RLHFDataset(str(on_path / "train.parquet"), tokenizer, config)
    assert len(data) == 6
    row = data[0]
    compute_score = module_of(on_path / "reward.py", "verl_reward").compute_score
    asked = (row["data_source"], row["reward_model"]["ground_truth"])
    assert compute_score(asked[0], asked[1], asked[1], row["extra_info"]) == 1.0
    assert compute_score(asked[0], "?", asked[1], row["extra_info"]) == 0.0


@pytest.mark.real
def test_skyrl_plays_its_rows(run: Path, on_path: Path) -> None:
    gym = pytest.importorskip("skyrl_gym")
    parquet = pytest.importorskip("pyarrow.parquet")
    hand_over(read_bundle(run), "skyrl", on_path)
    row = parquet.read_table(on_path / "train.parquet").to_pylist()[0]
    module_of(on_path / "env.py", "skyrl_env")
    env = gym.make(row["env_class"], env_config={}, extras=row)
    assert env.init(row["prompt"])[0] == row["prompt"]
    done = env.step(row["reward_spec"]["ground_truth"])
    assert done["done"] and done["reward"] == 1.0


@pytest.mark.real
def test_verifiers_loads_its_taskset_and_scores(run: Path, on_path: Path) -> None:
    vf = pytest.importorskip("verifiers.v1", exc_type=ImportError)
    hand_over(read_bundle(run), "verifiers", on_path)
    importlib.invalidate_caches()
    package = importlib.import_module("tfgrpo_my_run")
    taskset = vf.load_taskset(package.RunConfig(id="tfgrpo_my_run"))
    loaded = list(taskset)
    assert {t.data.id for t in loaded} == {t.task_id for t in read_material(run).practice}

    class Said:
        last_reply = loaded[0].data.prompt_text.rsplit(" ", 1)[-1]

    assert asyncio.run(loaded[0].judged(Said())) == 1.0


def test_what_cannot_be_handed_over_is_refused(run: Path, tmp_path: Path) -> None:
    bundle = read_bundle(run)
    with pytest.raises(ConfigError, match="no trainer 'grail': there are trl, verl"):
        hand_over(bundle, "grail", tmp_path / "a")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "mine.txt").write_text("mine")
    with pytest.raises(ConfigError, match="not empty"):
        hand_over(bundle, "trl", tmp_path / "b")
    other = read_bundle(run, verifier={"kind": "numeric"})
    with pytest.raises(ConfigError, match="judged its rollouts"):
        hand_over(other, "trl", tmp_path / "c")


def test_the_command(run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    told = here(capsys, "handover", str(run), "--to", "slime", "--out", str(out))
    assert told.code == 0, told.err
    assert "6 training rows, 6 for validation" in told.out
    rows = [json.loads(line) for line in (out / "train.jsonl").read_text().splitlines()]
    assert {r["label"] for r in rows} == {t.reference for t in read_material(run).practice}


def test_a_refused_hand_over_leaves_its_folder_empty_for_the_next_try(
    run: Path, tmp_path: Path
) -> None:
    for to in sorted(TARGETS):
        out = tmp_path / to
        with pytest.raises(ConfigError, match="name it, as with --verifier"):
            hand_over(read_bundle(run, verifier={"kind": "exact"}), to, out)
        assert list(out.iterdir()) == []
        assert hand_over(read_bundle(run, verifier=FUNCTION), to, out) == out


@pytest.mark.parametrize("to", sorted(TARGETS))
def test_odd_texts_hints_and_no_references_are_written(tmp_path: Path, to: str) -> None:
    given = [
        Task(f"t\u2028{i}", f"half \ud83d of one, {i} x{i}", metadata={"hints": hints})
        for i, hints in enumerate([5, {"a": 1}, ["one", 2], "all", True, None] * 3)
    ]
    config = Config.from_mapping({
        "run": {"folder": str(tmp_path / "run")},
        "policy": {"lm": "scripted:echo"},
        "verifier": {"kind": "regex", "pattern": "^x"},
        "learn": {"batch": 6, "group_size": 2, "entries": "exemplars"},
    })  # fmt: skip
    policy = FunctionPolicy(lambda prompt, context: prompt.split()[-1], policy_id="last")
    learn(config, tasks=given, policy=policy)
    bundle = read_bundle(tmp_path / "run")
    assert {tuple(row.hints) for row in bundle.rows} <= {(), ("one",), ("all",)}
    assert {row.reference for row in bundle.rows} == {""}
    root = hand_over(bundle, to, tmp_path / "out")
    verifier = RunVerifier.load(next(root.rglob("verifier.json")).parent)
    assert set(verifier.tasks) == {row.task.task_id for row in bundle.rows}
    assert {verifier.score(name, "x1") for name in verifier.tasks} == {1.0}


def test_a_verifier_of_groups_is_no_reward_of_single_replies(run: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="another trainer judges each reply alone"):
        hand_over(read_bundle(run, verifier={"kind": "majority"}), "trl", tmp_path / "out")


def test_tool_calls_in_a_tasks_turns_stay_in_its_prompt(run: Path) -> None:
    row = read_bundle(run, library=False).rows[0]
    call = ToolCall("c1", "look", '{"at": 1}')
    turns = (Message("assistant", "", (call,)), Message("tool", "found", tool_call_id="c1"))
    asked, answered = replace(row, prompt=turns).turns
    assert asked["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"at": 1}'}
    assert answered == {"role": "tool", "content": "found", "tool_call_id": "c1"}
