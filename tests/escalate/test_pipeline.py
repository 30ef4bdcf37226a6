"""The whole way on a tiny model: splits respected, stages kept, all four arms, clear refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.escalate.made import learnt, tasks, verifier, write_model
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.escalate import EscalateSettings, escalate, preview
from tfgrpo.escalate import distil_stage as distilling
from tfgrpo.escalate.journal import EscalationJournal
from tfgrpo.escalate.run_data import read_material
from tfgrpo.rl.checkpoints.files import sha256
from tfgrpo.store import Journal
from tfgrpo.tasks.files import read_tasks

pytestmark = pytest.mark.real

SMALL = EscalateSettings(
    dtype="float32", epochs=4, looks=2, lr=5e-3, grpo_steps=0, draws=3, tasks_per_step=3
)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return learnt(tmp_path)


def test_material_respects_the_splits_and_reads_no_test_group(run) -> None:
    material = read_material(run)
    splits = [{t.task_id for t in s} for s in (material.practice, material.gate, material.test)]
    assert [len(s) for s in splits] == [6, 6, 6]
    assert set.union(*splits) == {t.task_id for t in tasks()}
    assert material.has_library
    assert {g.task.task_id for g in material.practice_groups} == splits[0]
    assert not {g.task.task_id for g in material.groups} & splits[2]


def test_no_task_is_shown_its_own_exemplar(run) -> None:
    material = read_material(run)
    entry = material.library.shown[0]
    own = next(t for t in material.practice if t.task_id in entry.provenance.task_ids)
    assert entry.experience_id not in {p.source for p in material.context(own).parts}
    other = next(t for t in material.practice if t.task_id not in entry.provenance.task_ids)
    assert entry.experience_id in {p.source for p in material.context(other).parts}


def test_the_whole_way_and_again(run) -> None:
    said: list[str] = []
    result = escalate(run, SMALL, verifier=verifier(), say=said.append)
    assert set(result.table.arms) == {"base", "base_library", "trained", "trained_library"}
    assert {i.n_tasks for i in result.table.arms.values()} == {6}
    assert result.distilled is not None and result.distilled.rows["journal"] > 0
    assert set(result.distilled.looks) == {"2", "4"}
    page = json.loads((run / "escalate" / "escalate.json").read_text())
    assert page["arms"]["base"] == result.table.arms["base"].to_dict()
    assert page["kept"] == result.kept and page["seconds"]["table"] > 0
    assert "| trained + library |" in (run / "escalate" / "escalate.md").read_text()
    marked = read_tasks(run / "escalate" / "tasks.jsonl")
    material = read_material(run)
    assert [t.task_id for t in marked] == [t.task_id for t in material.practice]
    assert {t.metadata["escalate"]["hint_from"] for t in marked} == {"solution"}
    assert any("tokens read" in line for line in said)

    again = escalate(run, SMALL, verifier=verifier(), say=said.append)
    assert again.table == result.table and again.kept == result.kept


def test_stages_and_rows_hold_the_tasks_of_their_split(run, monkeypatch) -> None:
    rows = []
    balanced = distilling.balanced

    def spy(found, **options):
        rows.extend(found)
        return balanced(found, **options)

    monkeypatch.setattr(distilling, "balanced", spy)
    escalate(run, SMALL, verifier=verifier())
    material = read_material(run)
    practice, gate, test = (
        {t.task_id for t in s} for s in (material.practice, material.gate, material.test)
    )
    assert rows and {r.task_id for r in rows} <= practice
    with Journal.open(run / "escalate", readonly=True) as store:
        for stage, allowed in (("practice", practice), ("gate", gate), ("test", test)):
            assert {g.task.task_id for g in store.groups(stage)} == allowed
        first_test = [g.metadata["stage"] for g in store.groups()].index("test")
        stages = [g.metadata["stage"] for g in store.groups()]
        assert set(stages[first_test:]) == {"test"}  # nothing is chosen after a test task is drawn
        arms = {g.metadata["arm"]: g.context.is_empty for g in store.groups("test")}
    assert arms == {
        "base": True,
        "base_library": False,
        "trained": True,
        "trained_library": False,
    }


@pytest.mark.parametrize("method", ["forward_kl", "reverse_kl", "nudge", "icpo"])
def test_every_method_goes_the_whole_way(run, method) -> None:
    settings = EscalateSettings(**SMALL.model_dump() | {"method": method, "epochs": 2, "looks": 1})
    result = escalate(run, settings, verifier=verifier())
    assert result.preview.plan.distil == method
    assert result.distilled is not None and result.distilled.steps == 4
    assert bool(result.distilled.rows) == method.endswith("_kl")
    assert len(result.table.arms) == 4


class Cut(Exception):
    """Stands for a killed process."""


def test_a_cut_escalation_goes_on_to_the_same_model_and_draws_nothing_twice(
    tmp_path, monkeypatch
) -> None:
    model = f"local:{write_model(tmp_path / 'model')}"
    first, second = learnt(tmp_path / "a", model), learnt(tmp_path / "b", model)
    whole = escalate(first, SMALL, verifier=verifier())

    def cut_at(text: str):
        def say(line: str) -> None:
            if line.startswith(text):
                raise Cut

        return say

    for text in ("distil, step 2", "table: trained "):
        with pytest.raises(Cut):
            escalate(second, SMALL, verifier=verifier(), say=cut_at(text))
    drawn: list[str] = []
    real = EscalationJournal.drawn

    def spy(self, stage, arm, these, draw):
        def noted():
            drawn.append(arm)
            return draw()

        return real(self, stage, arm, these, noted)

    monkeypatch.setattr(EscalationJournal, "drawn", spy)
    again = escalate(second, SMALL, verifier=verifier())
    assert drawn == ["trained", "trained_library"]
    assert again.table == whole.table and again.distilled is not None
    assert again.distilled.looks == whole.distilled.looks
    weights = [r / "escalate" / "distil" / "best" / "model.safetensors" for r in (first, second)]
    assert sha256(weights[0]) == sha256(weights[1])
    assert not (second / "escalate" / "distil" / "checkpoints").exists()


def test_the_forecast_counts_what_is_drawn(run) -> None:
    cost = {s.stage: s for s in preview(run, SMALL, verifier=verifier()).cost.stages}
    assert not (run / "escalate").exists()  # a preview writes nothing
    escalate(run, SMALL, verifier=verifier())
    with Journal.open(run / "escalate", readonly=True) as store:
        for name, stage in (("draws", "practice"), ("looks", "gate"), ("table", "test")):
            groups = list(store.groups(stage))
            assert cost[name].rollouts == sum(len(g.rollouts) for g in groups)
            assert cost[name].prompt_tokens == sum(g.metadata["prompt_tokens"] for g in groups)
            made = sum(r.usage.completion_tokens for g in groups for r in g.rollouts)
            assert made <= cost[name].completion_high
    assert cost["distil"].trained_tokens > 0


def test_a_model_behind_an_api_is_one_clear_line(tmp_path) -> None:
    run = learnt(tmp_path, "openai:gpt-5-mini")
    with pytest.raises(ConfigError, match="--model local:PATH"):
        escalate(run, SMALL, verifier=verifier())
    model = f"local:{write_model(tmp_path / 'model')}"
    found = preview(run, EscalateSettings(**SMALL.model_dump() | {"model": model}),
                    verifier=verifier())  # fmt: skip
    assert found.model == model
    assert any("openai:gpt-5-mini" in note for note in found.notes)


def test_other_settings_in_the_same_folder_are_refused(run) -> None:
    escalate(run, SMALL, verifier=verifier())
    other = EscalateSettings(**SMALL.model_dump() | {"lr": 1e-4})
    with pytest.raises(ConfigError, match=r"settings\.lr"):
        escalate(run, other, verifier=verifier())
    result = escalate(run, other, verifier=verifier(), folder=run / "other")
    assert (run / "other" / "escalate.json").is_file() and result.folder == run / "other"


def test_what_is_no_finished_run_is_refused(tmp_path) -> None:
    with pytest.raises(StoreError, match="there is no run"):
        escalate(tmp_path, SMALL)
    with Journal.open(tmp_path / "half", create=True, config={"tasks": {}}):
        pass
    with pytest.raises(ConfigError, match="no finished learning run"):
        escalate(tmp_path / "half", SMALL)


def test_a_run_without_a_library_trains_on_its_verified_replies(tmp_path) -> None:
    run = learnt(tmp_path, learn={"settings": {"exemplars": 0}})
    result = escalate(run, SMALL, verifier=verifier())
    assert set(result.table.arms) == {"base", "trained"}
    if result.distilled is not None:
        assert set(result.distilled.rows) == {"journal"}


def test_the_command_forecasts_as_json(run, capsys) -> None:
    from tfgrpo.cli.main import main

    with pytest.raises(SystemExit) as left:
        main(["escalate", str(run), "--dry-run", "--json", "--set", "dtype=float32"])
    assert left.value.code == 0
    row = json.loads(capsys.readouterr().out)
    assert row["plan"]["distil"] and row["cost"]["seconds"] > 0
    assert not (run / "escalate").exists()


def test_the_command_trains_and_its_exit_code_is_the_verdict(tmp_path, capsys) -> None:
    from tfgrpo.cli.main import main

    run = learnt(tmp_path, verifier={"kind": "regex", "pattern": "[a-m]"})
    options = ["--set", "dtype=float32", "--set", "epochs=2", "--set", "looks=1"]
    with pytest.raises(SystemExit) as left:
        main(["escalate", str(run), "--grpo-steps", "0", "--json", *options])
    said = capsys.readouterr()
    row = json.loads(said.out)
    assert left.value.code == row["exit_code"] == {"met": 0, "not_met": 1}[row["verdict"]["status"]]
    assert "model to train" in said.err and "distil, step" in said.err
    with pytest.raises(SystemExit) as left:
        main(["escalate", str(run), "--set", "epoch=2"])
    assert left.value.code == 2 and "did you mean 'epochs'" in capsys.readouterr().err


@pytest.mark.parametrize("solved", [False, True])
def test_grpo_trains_on_what_the_profile_finds_mixed(run, solved) -> None:
    settings = EscalateSettings(**SMALL.model_dump() | {"method": "none", "grpo_steps": 2})
    if solved:
        settings = settings.model_copy(update={"method": "supervised", "epochs": 1, "looks": 1})
    result = escalate(run, settings, verifier=verifier())
    assert result.practised is not None and result.practised.tasks >= 2
    assert result.practised.steps == 2
    assert (run / "escalate" / "grpo" / "model" / "model.safetensors").is_file()
    assert not (run / "escalate" / "grpo" / "checkpoints").exists()
    assert result.kept in ("base", "distilled", "grpo")
    again = escalate(run, settings, verifier=verifier())
    assert again.table == result.table and again.practised == result.practised


def test_notebooks_may_call_it(run) -> None:
    import asyncio

    async def cell():
        return preview(run, SMALL, verifier=verifier())

    assert asyncio.run(cell()).plan.distil == "supervised"
