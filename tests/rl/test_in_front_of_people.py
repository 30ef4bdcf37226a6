"""What a person gets of training: a score before, its gain, replies, checkpoints, card, hub."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.rl.test_trainer import fingerprint, make, metrics
from tests.rl.tiny import tiny_config, tiny_tasks
from tfgrpo.errors import StoreError
from tfgrpo.report.served.training import load_training, render_training
from tfgrpo.rl.checkpoints import files as checkpoint
from tfgrpo.rl.checkpoints.export import result_words
from tfgrpo.rl.checkpoints.hub import origin_of, push
from tfgrpo.rl.monitoring.held_out import HeldOutLog
from tfgrpo.rollout import Task


def held_out() -> list[Task]:
    return [Task(f"held-{i}", t.prompt, t.reference) for i, t in enumerate(tiny_tasks()[:3])]


def evaluations(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(x) for x in (folder / "evaluations.jsonl").read_text().splitlines()]


def test_held_out_tasks_are_scored_before_and_after_and_the_gain_is_paired(tmp_path) -> None:
    trainer = make(tiny_config(tmp_path, run={"evaluate_draws": 4}), held_out=held_out())
    last = trainer.train()
    rows = evaluations(tmp_path)
    assert [r["step"] for r in rows] == [0, 4]
    assert last["before"]["mean"] == rows[0]["mean"] and last["mean"] == rows[1]["mean"]
    by_task = [
        sum(rows[1]["scores"][t]) / 4 - sum(rows[0]["scores"][t]) / 4 for t in rows[0]["scores"]
    ]
    assert last["gain"]["estimate"] == pytest.approx(sum(by_task) / len(by_task))
    assert f"Before training it was {rows[0]['mean']:.3f}" in result_words(last)


def test_scoring_beforehand_changes_no_step_and_can_be_left_out(tmp_path) -> None:
    first = make(tiny_config(tmp_path / "a"), held_out=held_out())
    first.train()
    second = make(tiny_config(tmp_path / "b", run={"evaluate_before": False}), held_out=held_out())
    last = second.train()
    assert fingerprint(first) == fingerprint(second)
    assert [r["step"] for r in evaluations(tmp_path / "b")] == [4] and "gain" not in last


def test_a_run_that_has_ended_is_not_scored_again(tmp_path, monkeypatch) -> None:
    done = make(tiny_config(tmp_path), held_out=held_out()).train()
    again = make(tiny_config(tmp_path), held_out=held_out())

    def refuse() -> None:
        raise AssertionError("scored again")

    monkeypatch.setattr(again, "evaluate", refuse)
    assert again.train() == done


def test_scores_of_other_held_out_tasks_are_none_of_these(tmp_path) -> None:
    path = tmp_path / "evaluations.jsonl"
    HeldOutLog(path, "these").add(0, {"t": [1.0], "u": [0.0]}, (0.0, 1.0))
    assert HeldOutLog(path, "these").of_step(0)["mean"] == 0.5
    assert HeldOutLog(path, "others").of_step(0) is None
    path.write_text(path.read_text() + '{"step": 4, "ke')
    assert HeldOutLog(path, "these").of_step(4) is None


def test_replies_of_each_step_are_kept_and_shown(tmp_path) -> None:
    make(tiny_config(tmp_path, run={"keep_samples": 1})).train()
    view = load_training(tmp_path)
    assert [row["step"] for row in view.samples] == [1, 2, 3, 4] and view.total == 4
    assert all(len(row["groups"]) == 1 for row in view.samples)
    (group,) = view.samples[-1]["groups"]
    assert len(group["replies"]) == 4 and group["task_id"] in render_training(view)
    assert len(metrics(tmp_path)) == len(view.steps) == 4


def test_a_checkpoint_without_optimiser_state_is_smaller_and_goes_on(tmp_path, caplog) -> None:
    sizes = []
    for keeps in (True, False):
        folder = tmp_path / str(keeps)
        config = tiny_config(folder, run={"save_optimiser": keeps})
        trainer = make(config)
        with caplog.at_level("INFO", "tfgrpo.rl.trainer"):
            trainer.train()
        (*_, newest) = checkpoint.found(folder / "checkpoints")
        sizes.append((newest / checkpoint.OPTIMISER).stat().st_size)
    assert sizes[1] < 0.5 * sizes[0]
    told = [r.getMessage() for r in caplog.records if "a checkpoint takes" in r.getMessage()]
    assert len(told) == 2 and all("2 are kept" in words for words in told)  # once for each run
    longer = make(tiny_config(folder, run={"save_optimiser": False}, optimiser={"steps": 6}))
    with caplog.at_level("WARNING"):
        assert longer.resume() and longer.step_number == 4
    assert "the optimiser starts anew" in caplog.text and longer.optimiser.steps == 0
    masters = {n: v for n, v in fingerprint(trainer).items() if n.startswith("master.")}
    assert masters == {n: v for n, v in fingerprint(longer).items() if n.startswith("master.")}
    longer.train()
    assert longer.step_number == 6


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("smollm2-135m", {}, ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")),
        ("ORG/model", {}, ("ORG/model", "")),
        ("runs/train/model", {}, ("", "")),
        ("./here/model", {}, ("", "")),
        ("runs/x", {"hub_id": "me/base", "licence": "mit"}, ("me/base", "mit")),
    ],
)
def test_a_model_is_called_as_the_hub_calls_it(name, given, expected) -> None:
    found = origin_of(name, **given)
    assert (found.hub_id, found.licence) == expected
    assert len(found.card_lines()) == sum(map(bool, expected))


def test_a_folder_says_where_its_model_came_from(tmp_path) -> None:
    (tmp_path / "config.json").write_text('{"_name_or_path": "ORG/base"}')
    assert origin_of(str(tmp_path)).hub_id == "ORG/base"
    (tmp_path / "config.json").write_text('{"_name_or_path": "/somewhere/local"}')
    assert origin_of(str(tmp_path)).hub_id == ""


def test_a_model_is_uploaded_or_the_way_to_do_it_is_told(tmp_path, monkeypatch) -> None:
    done: list[tuple[Any, ...]] = []

    class Api:
        def create_repo(self, name: str, *, private: bool, exist_ok: bool) -> None:
            if name == "them/model":
                raise PermissionError("403")
            done.append((name, private, exist_ok))

        def upload_folder(self, *, repo_id: str, folder_path: str) -> None:
            done.append((repo_id, folder_path))

    monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(HfApi=Api))
    assert push(tmp_path, "me/model", private=True) == "https://huggingface.co/me/model"
    assert done == [("me/model", True, True), ("me/model", str(tmp_path))]
    with pytest.raises(StoreError, match=r"hf upload them/model .*"):
        push(tmp_path, "them/model", private=True)
