"""Files of each trainer: rows in its form, a reward that asks the run's verifier, a command.

Each form was read in the trainer's own released loader; a test loads every file with it where it
is installed. Does not know how a run is read. Sources: TRL 1.16 `GRPOTrainer`, verl 0.9
`RLHFDataset` and `naive` reward manager, SkyRL 0.4 `skyrl_gym`, verifiers 0.4 `v1.Taskset`, slime
`--custom-rm-path`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tfgrpo.handover.bundle import SPLIT_FILES, Bundle, TaskRow
from tfgrpo.runtime.texts.surrogates import without_surrogates
from tfgrpo.store.export import parquet_library

__all__ = ["TARGETS", "Target"]

_LOAD = '''"""Rewards by the run's own verifier. Written by `tfgrpo handover`."""

from pathlib import Path

from tfgrpo.handover import RunVerifier

VERIFIER = RunVerifier.load(Path(__file__).parent)
'''

_TRL_REWARD = (
    _LOAD
    + '''

def reward(prompts, completions, task_id, **columns):
    """One reward a completion, None where the verifier failed."""
    replies = [c if isinstance(c, str) else c[-1]["content"] for c in completions]
    return [VERIFIER.score(task, reply) for task, reply in zip(task_id, replies, strict=True)]
'''
)

_TRL_TRAIN = '''"""Start with: python train.py MODEL"""

import sys

from datasets import load_dataset
from reward import reward
from trl import GRPOConfig, GRPOTrainer

files = {"train": "train.jsonl", "validation": "validation.jsonl"}
data = load_dataset("json", data_files=files)
trainer = GRPOTrainer(
    model=sys.argv[1],
    reward_funcs=reward,
    args=GRPOConfig(output_dir="trained", num_generations=8),
    train_dataset=data["train"],
    eval_dataset=data["validation"],
)
trainer.train()
'''

_VERL_REWARD = (
    _LOAD
    + '''

def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    """The reward of a reply, 0 where the verifier failed: verl knows no missing reward."""
    reward = VERIFIER.score(extra_info["task_id"], solution_str)
    return 0.0 if reward is None else reward
'''
)

_VERL_RUN = """#!/bin/sh
# Start with: sh run.sh MODEL
set -eu
cd "$(dirname "$0")"
python -m verl.trainer.main_ppo \\
  algorithm.adv_estimator=grpo \\
  data.train_files="$PWD/train.parquet" data.val_files="$PWD/validation.parquet" \\
  data.prompt_key=prompt data.reward_fn_key=data_source \\
  reward.custom_reward_function.path="$PWD/reward.py" \\
  reward.custom_reward_function.name=compute_score \\
  actor_rollout_ref.model.path="$1" actor_rollout_ref.rollout.n=8
"""

_SKYRL_ENV = (
    _LOAD
    + '''

from skyrl_gym.envs.base_text_env import BaseTextEnv, BaseTextEnvStepOutput  # noqa: E402
from skyrl_gym.envs.registration import register  # noqa: E402


class RunEnv(BaseTextEnv):
    """One reply, judged by the run's verifier; 0 where it failed."""

    def __init__(self, env_config=None, extras=None):
        super().__init__()
        self.task_id = extras["extra_info"]["task_id"]

    def step(self, action):
        reward = VERIFIER.score(self.task_id, action)
        return BaseTextEnvStepOutput(
            observations=[], reward=0.0 if reward is None else reward, done=True, metadata={}
        )


register(id="NAME", entry_point=RunEnv)
'''
)

_VERIFIERS_PACKAGE = '''"""The run as a taskset. Written by `tfgrpo handover`."""

import json
from pathlib import Path

import verifiers.v1 as vf

from tfgrpo.handover import RunVerifier

FOLDER = Path(__file__).parent
VERIFIER = RunVerifier.load(FOLDER)

__all__ = ["RunTaskset"]


class RunTask(vf.Task[vf.TaskData, vf.State, vf.TaskConfig]):
    """One task of the run."""

    @vf.reward
    async def judged(self, trace: vf.Trace) -> float:
        """Reward of the last reply, 0 where the verifier failed."""
        reward = await VERIFIER.score_async(self.data.id, trace.last_reply)
        return 0.0 if reward is None else reward


class RunConfig(vf.TasksetConfig):
    """Which rows: `train` or `validation`."""

    split: str = "train"


class RunTaskset(vf.Taskset[RunTask, RunConfig]):
    """The run's tasks."""

    def load(self):
        with (FOLDER / f"{self.config.split}.jsonl").open(encoding="utf-8") as lines:
            for line in lines:
                yield RunTask(vf.TaskData(**json.loads(line)), self.config.task)
'''

_VERIFIERS_PROJECT = """[project]
name = "NAME"
version = "0.1.0"
requires-python = ">=3.11"
dependencies = ["verifiers>=0.4,<0.5", "tfgrpo"]

[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[tool.hatch.build.targets.wheel]
packages = ["NAME"]
"""

_SLIME_REWARD = (
    _LOAD
    + '''

async def reward(args, sample, **kwargs):
    """The reward of a sample, 0 where the verifier failed."""
    found = await VERIFIER.score_async(sample.metadata["task_id"], sample.response)
    return 0.0 if found is None else found
'''
)


@dataclass(frozen=True, slots=True)
class Target:
    """One trainer's form."""

    reads: str
    """Trainer and version whose loader was read."""
    row: Callable[[TaskRow, Bundle], dict[str, Any]]
    """One task in its form."""
    suffix: str
    """Form of the data files: `jsonl` or `parquet`."""
    files: Mapping[str, str]
    """Further files: name to text; NAME stands for the data set's name."""
    start: str
    """The command that starts a training, run in the folder."""
    package: bool = False
    """Everything but the project file lies in a package that has the data set's name."""
    failed: str = "counts as reward 0"
    """What becomes of a reply that the verifier failed on."""


def _trl(row: TaskRow, bundle: Bundle) -> dict[str, Any]:
    del bundle
    return {"prompt": row.turns, "task_id": row.task.task_id, "hints": row.hints}


def _verl(row: TaskRow, bundle: Bundle) -> dict[str, Any]:
    return {
        "data_source": bundle.name,
        "prompt": row.turns,
        "ability": "tfgrpo",
        "reward_model": {"style": "rule", "ground_truth": row.reference},
        "extra_info": _extra(row),
    }


def _skyrl(row: TaskRow, bundle: Bundle) -> dict[str, Any]:
    return {
        "data_source": bundle.name,
        "prompt": row.turns,
        "env_class": bundle.name,
        "reward_spec": {"method": "rule", "ground_truth": row.reference},
        "extra_info": _extra(row),
    }


def _verifiers(row: TaskRow, bundle: Bundle) -> dict[str, Any]:
    del bundle
    head, *rest = row.turns
    if head["role"] != "system":
        head, rest = {"content": ""}, row.turns
    prompt: Any = rest[0]["content"] if [t["role"] for t in rest] == ["user"] else rest
    system = {"system_prompt": head["content"]} if head["content"] else {}
    return {"id": row.task.task_id, "prompt": prompt, **system}


def _slime(row: TaskRow, bundle: Bundle) -> dict[str, Any]:
    metadata = {"source_name": bundle.name, **_extra(row)}
    return {"prompt": row.turns, "label": row.reference, "metadata": metadata}


def _extra(row: TaskRow) -> dict[str, Any]:
    index = {"split": SPLIT_FILES[row.split], "task_id": row.task.task_id}
    return {**index, "hints": json.dumps(row.hints, ensure_ascii=False)}


TARGETS: Mapping[str, Target] = {
    "trl": Target(
        "TRL 1.16",
        _trl,
        "jsonl",
        {"reward.py": _TRL_REWARD, "train.py": _TRL_TRAIN},
        "python train.py MODEL",
        failed="is left out",
    ),
    "verl": Target(
        "verl 0.9",
        _verl,
        "parquet",
        {"reward.py": _VERL_REWARD, "run.sh": _VERL_RUN},
        "sh run.sh MODEL",
    ),
    "skyrl": Target(
        "SkyRL 0.4",
        _skyrl,
        "parquet",
        {"env.py": _SKYRL_ENV},
        "import env.py in the trainer's entry point; data.train_data=\"['train.parquet']\"",
    ),
    "verifiers": Target(
        "verifiers 0.4 (prime-rl)",
        _verifiers,
        "jsonl",
        {"__init__.py": _VERIFIERS_PACKAGE, "pyproject.toml": _VERIFIERS_PROJECT},
        "pip install . ; then name NAME as the taskset's id",
        package=True,
    ),
    "slime": Target(
        "slime",
        _slime,
        "jsonl",
        {"reward.py": _SLIME_REWARD},
        "--prompt-data train.jsonl --input-key prompt --label-key label --apply-chat-template "
        "--custom-rm-path reward.reward",
    ),
}
"""Name of a trainer to its form."""


def write_rows(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as JSON lines or Parquet, by the file's ending; halves of characters, which no
    file of UTF-8 holds, become U+FFFD.

    Raises:
        MissingExtraError: Parquet without pyarrow.
    """
    rows = [without_surrogates(row) for row in rows]
    if path.suffix == ".jsonl":
        lines = (json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        path.write_text("".join(lines), encoding="utf-8")
        return
    pyarrow, parquet = parquet_library()
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
