"""`[fleets.NAME]` in a config: files beside it, roles that use it, and what a resume may change."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tfgrpo.config.learn import Config
from tfgrpo.errors import ChangedSettingsError
from tfgrpo.learning.components import RunComponents
from tfgrpo.learning.forecast.rehearsal import rehearse
from tfgrpo.learning.learn import open_run
from tfgrpo.lm import open_lm
from tfgrpo.rollout import Rollout, Score, Task
from tfgrpo.serve.settings import GatewaySettings

TOML = """
[fleets.own]
servers = "servers.txt"
model = "qwen"
"""


def config(folder: Path, **fleet: Any) -> Config:
    own = {"servers": ["http://a:8000/v1"], "model": "qwen"} | fleet
    return Config.from_mapping(
        {
            "run": {"folder": str(folder / "run")},
            "policy": {"lm": "fleet:own"},
            "fleets": {"own": own},
        }
    )


def test_a_file_of_servers_lies_beside_the_config(tmp_path: Path) -> None:
    (tmp_path / "learn.toml").write_text(TOML)
    expected = str(tmp_path / "servers.txt")
    assert Config.from_toml(tmp_path / "learn.toml").fleets["own"]["servers"] == expected
    assert GatewaySettings.from_toml(tmp_path / "learn.toml").fleets["own"]["servers"] == expected


async def test_roles_of_one_fleet_share_its_servers(tmp_path: Path) -> None:
    opened: list[tuple[str, dict[str, Any]]] = []

    def opener(spec: str, **options: Any) -> Any:
        from tfgrpo.lm import open_lm

        opened.append((spec, options))
        return open_lm(spec, **options)

    settings = config(tmp_path)
    with open_run(settings) as store:
        roles = RunComponents(settings, store, opener)
        lm = roles.lm(settings.policy)
        assert roles.lm(settings.critic).identity == lm.identity
        assert opened == [("fleet:own", {"servers": ["http://a:8000/v1"], "model": "qwen"})]
        await roles.aclose()


def test_a_resume_may_have_other_servers_and_no_other_model(tmp_path: Path) -> None:
    with open_run(config(tmp_path)) as store:
        graded = Rollout("r", "t").graded(Score(1.0))
        store.record_rollout(graded, group_id="g", verifier_id="v")
    more = ["http://b:8000/v1", "http://c:8000/v1"]
    open_run(config(tmp_path, servers=more, hedge_share=0.0)).close()
    with pytest.raises(ChangedSettingsError, match=r"fleets.own.model: 'qwen' -> 'other'"):
        open_run(config(tmp_path, model="other"))


async def test_the_rehearsal_opens_a_fleet_as_the_run_does(tmp_path: Path) -> None:
    settings = config(tmp_path)
    assert await rehearse(settings, [Task("t", "1 + 1?", "2")], open_lm) == []
