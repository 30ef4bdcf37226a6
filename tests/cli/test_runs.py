"""`runs list|purge` and `export`, run as a user runs them."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from tests.cli.command_line import here
from tests.learning.worlds import HARMFUL, HELPFUL, World, settings
from tests.store.driver import CountingServer, Settings, run_whole
from tests.store.test_crash_property import run_until_death
from tfgrpo.cli.runs import export, runs_app
from tfgrpo.errors import ConfigError, StoreError
from tfgrpo.store import Journal, read_groups

RUNNER = CliRunner()
EXPORT = typer.Typer()
EXPORT.command()(export)


@pytest.fixture
def runs(tmp_path: Path) -> Path:
    run_whole(tmp_path / "runs" / "whole", CountingServer(), Settings())
    given, server = Settings(), CountingServer()
    run_until_death(tmp_path / "runs" / "killed", server, given, 20, True)
    return tmp_path / "runs"


def test_list_tells_rollouts_calls_money_and_interruptions(runs: Path) -> None:
    run_until_death(runs / "killed", CountingServer(), Settings(), 10, True)
    done = RUNNER.invoke(runs_app, ["list", str(runs), "--json"])
    rows = {Path(r["run"]).name: r for r in map(json.loads, done.stdout.splitlines())}
    assert rows["whole"]["rollouts"] == 24
    assert rows["whole"]["calls"] == 26
    assert rows["whole"]["cost_usd"] > 0 == rows["whole"]["booked_usd"]
    assert (rows["whole"]["interruptions"], rows["killed"]["interruptions"]) == (0, 1)
    assert rows["killed"]["booked_usd"] > 0
    text = RUNNER.invoke(runs_app, ["list", str(runs)]).stdout
    assert "24 rollouts in 8 groups, 26 calls" in text
    assert "for calls cut off" in text and "interrupted 1x" in text


def test_list_goes_on_past_a_damaged_run(runs: Path) -> None:
    raw = (runs / "whole" / "run.db").read_bytes()
    (runs / "whole" / "run.db").write_bytes(raw[: len(raw) // 2])
    done = RUNNER.invoke(runs_app, ["list", str(runs)])
    assert done.exit_code == 0
    assert "run.db is damaged" in done.stdout and "killed" in done.stdout
    (runs / "whole" / "run.db").write_bytes(b"not a journal, for sure" * 100)
    (runs / "whole" / "run.db-sums").unlink()  # as before there were checksums
    done = RUNNER.invoke(runs_app, ["list", str(runs)])
    assert done.exit_code == 0
    assert "damaged or not a journal" in done.stdout and "killed" in done.stdout


def test_list_of_nothing_says_so(tmp_path: Path) -> None:
    assert "no runs under" in RUNNER.invoke(runs_app, ["list", str(tmp_path)]).stdout


def test_purge_asks_deletes_runs_and_nothing_else(runs: Path) -> None:
    folder = runs / "whole"
    no = RUNNER.invoke(runs_app, ["purge", str(folder)], input="n\n")
    assert "nothing was deleted" in no.stdout and folder.exists()
    with Journal.open(folder):
        used = RUNNER.invoke(runs_app, ["purge", "--yes", str(folder)])
        assert isinstance(used.exception, StoreError) and "in use" in str(used.exception)
    precious = runs / "precious"
    precious.mkdir()
    wrong = RUNNER.invoke(runs_app, ["purge", "--yes", str(folder), str(precious)])
    assert isinstance(wrong.exception, StoreError) and "no run folder" in str(wrong.exception)
    assert folder.exists() and precious.exists()
    link = runs / "link"
    link.symlink_to(folder)
    linked = RUNNER.invoke(runs_app, ["purge", "--yes", str(link)])
    assert isinstance(linked.exception, StoreError)
    assert RUNNER.invoke(runs_app, ["purge", "--yes", str(folder)]).exit_code == 0
    assert not folder.exists() and precious.exists()


def test_export_writes_what_the_run_holds_also_while_it_goes_on(runs: Path) -> None:
    out = runs / "out.jsonl"
    with Journal.open(runs / "whole") as store:
        done = RUNNER.invoke(EXPORT, [str(runs / "whole"), str(out)])
        assert done.exit_code == 0, done.exception
        assert list(read_groups(out)) == list(store.groups())
    assert "8 groups ->" in done.stdout
    none = RUNNER.invoke(EXPORT, [str(runs / "whole"), str(out), "--stage", "gate"])
    assert isinstance(none.exception, ConfigError) and "no groups of stage" in str(none.exception)


def test_exported_parquet_is_read_by_datasets(runs: Path) -> None:
    datasets = pytest.importorskip("datasets", reason="datasets is not installed")
    out = runs / "out.parquet"
    assert RUNNER.invoke(EXPORT, [str(runs / "whole"), str(out)]).exit_code == 0
    table = datasets.Dataset.from_parquet(str(out), cache_dir=str(runs / "cache"))
    groups = list(read_groups(out))
    assert table["group_id"][:] == [g.group_id for g in groups]
    assert [[r for r in row if r is not None] for row in table["rewards"]] == [
        list(g.rewards_G) for g in groups
    ]
    assert table["outcomes"][0] == [r.outcome for r in groups[0].rollouts]


def test_parquet_without_pyarrow_names_the_extra(
    runs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    done = RUNNER.invoke(EXPORT, [str(runs / "whole"), str(runs / "x.parquet")])
    assert "pip install 'tfgrpo[parquet]'" in str(done.exception)
    assert not (runs / "x.parquet").exists()


def test_importing_the_store_loads_no_third_party_module() -> None:
    import subprocess

    code = (
        "import sys; before = set(sys.modules); import tfgrpo.store, tfgrpo.store.budget;"
        "new = {m.split('.')[0] for m in set(sys.modules) - before};"
        "print(sorted(new - set(sys.stdlib_module_names) - {'tfgrpo'}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_the_list_says_when_what_was_kept_and_training(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kept = World(lesson=HELPFUL).learn(settings(tmp_path / "a"))
    World(lesson=HARMFUL).learn(settings(tmp_path / "b"))
    (tmp_path / "a" / "run").rename(tmp_path / "good")
    (tmp_path / "b" / "run").rename(tmp_path / "bad")
    (tmp_path / "train").mkdir()
    row = {"step": 7, "reward_mean": 0.25}
    (tmp_path / "train" / "metrics.jsonl").write_text(json.dumps(row) + "\n")
    lines = {
        line.partition(":")[0].rpartition("/")[2]: line
        for line in here(capsys, "runs", "list", str(tmp_path)).out.splitlines()
    }
    assert kept.learned.proof is not None and kept.learned.proof.difference is not None
    gain = f"gain {kept.learned.proof.difference.estimate:+.3f}"
    assert ", kept, " in lines["good"] and gain in lines["good"]
    assert "candidate, not kept" in lines["bad"] and "gain" not in lines["bad"]
    assert "training, 7 steps, mean reward 0.250" in lines["train"]
    assert all(re.search(r": \d{4}-\d\d-\d\d \d\d:\d\d,", line) for line in lines.values())
