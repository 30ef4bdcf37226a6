"""The Triton kernels without a GPU: run by Triton's interpreter against their torch forms, and
compiled for a GPU."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.patience import LONG_S

ROOT = Path(__file__).parents[3]
APART = Path(sys.prefix) / "peers" / "triton"
HAS_TRITON = (APART / "triton").is_dir() or importlib.util.find_spec("triton") is not None
pytestmark = [
    pytest.mark.real,
    pytest.mark.long,
    pytest.mark.skipif(not HAS_TRITON, reason=f"triton is neither in {APART} nor installed"),
]


def work(module: str, *arguments: str, **environment: str) -> str:
    """Run a worker that sees Triton; return what it printed."""
    paths = os.pathsep.join([str(ROOT), str(APART)])
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": paths, **environment},
        capture_output=True,
        text=True,
        timeout=LONG_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.fixture(scope="module")
def differences(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    out = tmp_path_factory.mktemp("kernels") / "differences.json"
    work("tests.rl.kernels.kernel_worker", str(out), TRITON_INTERPRET="1")
    found: dict[str, Any] = json.loads(out.read_text())
    return found


def test_every_kernel_compiles_for_a_gpu(tmp_path) -> None:
    """In bfloat16 and float32; the cache is a fresh one, so that all are compiled."""
    compiled = set(work("tests.rl.kernels.compile_worker", TRITON_CACHE_DIR=str(tmp_path)).split())
    written = set()
    for path in (ROOT / "tfgrpo" / "rl" / "kernels").glob("*.py"):
        text = path.read_text()
        defined = re.findall(r"@triton\.jit\ndef (\w+)", text)
        written |= {name for name in defined if f"{name}[" in text}
    assert compiled == written
    assert len(written) >= 13


def test_norms_and_gates_equal_the_torch_forms(differences) -> None:
    for kind in ("norm", "silu"):
        for size, gaps in differences[kind].items():
            assert max(gaps) < 1e-5, (kind, size)


def test_attention_of_a_decode_step_equals_the_torch_form_and_appends_to_the_cache(
    differences,
) -> None:
    assert len(differences["attention"]) == 5
    for case, (out, elsewhere, keys, values) in differences["attention"].items():
        assert max(out, elsewhere) < 1e-4 and keys < 1e-5 and values == 0, case


def test_drawn_tokens_equal_the_torch_form_at_every_number_and_temperature(differences) -> None:
    for vocab, gaps in differences["pick"].items():
        for name in ("token", "position", "count", "limit", "alive", "uniform", "out_token"):
            assert gaps[name] == 0, (vocab, name)
        assert gaps["out_logp"] < 1e-5
        # 96 of 120 rows live; some end at their limit, some at an end token before it, some go on
        assert gaps["moved"] == 96
        assert 96 > gaps["ended"] > gaps["ended_at_limit"] > 0


def test_copies_are_summed_and_logits_tell_what_torch_says(differences) -> None:
    assert len(differences["copies"]) == 3 and len(differences["gradient"]) == 6
    for kind in ("copies", "gradient"):
        for case, gaps in differences[kind].items():
            assert max(gaps) < 1e-5, (kind, case)


@pytest.mark.parametrize("kind", ["norm_back", "rotated", "gated", "added"])
def test_steps_of_a_block_and_their_gradients_equal_autograd(differences, kind) -> None:
    assert len(differences[kind]) >= 2
    for case, gaps in differences[kind].items():
        assert max(gaps) < 2e-5, (kind, case)


def test_steps_of_the_optimiser_equal_the_torch_form_chances_included(differences) -> None:
    assert len(differences["adam"]) == 12
    for case, gaps in differences["adam"].items():
        # a bfloat16 moment may fall to the other side where float32 differs in its last bit
        assert max(gaps) < (1e-2 if "True" in case.split()[1] else 1e-6), case
        assert sum(gap > 1e-6 for gap in gaps) <= 2, case


def test_an_update_through_the_kernels_equals_one_through_torch(differences) -> None:
    assert len(differences["trained"]) == 3
    for case, gaps in differences["trained"].items():
        assert len(gaps) > 30
        for name, gap in gaps.items():
            assert gap < (2e-4 if name.startswith("master") else 1e-4), (case, name, gap)


def test_sums_of_gradients_equal_what_autograd_forms_without_them(differences) -> None:
    assert len(differences["summed"]) == 3
    for case, gaps in differences["summed"].items():
        assert len(gaps) > 10 and {"embed", "norm", "layers.1.down"} <= gaps.keys()
        assert ("head" in gaps) == ("mistral" in case)
        assert max(gaps.values()) < 1e-4, (case, max(gaps, key=gaps.get))


def test_a_generator_draws_the_same_tokens_through_the_kernels(differences) -> None:
    torch_form, kernel_form, with_prompts_read_once = differences["generated"]
    assert kernel_form == torch_form
    assert with_prompts_read_once == torch_form
    assert len({tuple(row) for row in torch_form}) == 14 and len(torch_form) == 28
    assert len({len(row) for row in torch_form}) > 2  # rows end at different times
