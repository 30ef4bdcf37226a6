"""A real vLLM as the trainer's maker of tokens on the CPU: in the process and as a server.

    sh tests/vllm/install.sh && python -m tests.benchmarks.rl.vllm_engines

For each engine the mean distance of its log-probs from those of the trainer's weights, in nats a
token: `before` with the starting weights, `after` with weights that were moved and handed over,
`stale` where nothing had been handed over. `train` is a run of `tfgrpo train` against the server.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl import vllm_cpu

COMMAND = "python -m tests.benchmarks.rl.vllm_engines"
STEPS = 3


def run(python: str, *arguments: str, code: int = 0) -> str:
    """Run a module of ours in an environment; return what it printed."""
    done = subprocess.run(
        [python, "-m", *arguments],
        cwd=vllm_cpu.ROOT,
        env=vllm_cpu.environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != code:
        raise RuntimeError(
            f"{arguments} ended with {done.returncode}, not {code}:\n{done.stderr[-3000:]}"
        )
    return done.stdout if code == 0 else done.stderr


def check(python: str, *arguments: str) -> dict[str, float]:
    """Return what `tests.vllm.engine_check` found, rounded."""
    last = run(python, "tests.vllm.engine_check", *arguments).strip().splitlines()[-1]
    return {name: round(value, 4) for name, value in json.loads(last).items()}


def settings(folder: Path, model: Path, base_url: str) -> Path:
    """Write the settings and tasks of a short run and return the settings' path."""
    tasks = [
        {
            "task_id": f"t{a}",
            "prompt": f"What is {a} + 3? Give only the number.",
            "reference": str(a + 3),
        }
        for a in range(2, 26)
    ]
    lines = (json.dumps(t) + "\n" for t in tasks)
    (folder / "tasks.jsonl").write_text("".join(lines), encoding="utf-8")
    sections: dict[str, dict[str, Any]] = {
        "model": {"lm": f"local:{model}", "dtype": "bfloat16", "device": "cpu"},
        "tasks": {"path": "tasks.jsonl"},
        "verifier": {"kind": "numeric"},
        "rollout": {
            "tasks_per_step": 8,
            "group_size": 4,
            "max_tokens": 12,
            "mismatch_mean": 0.1,
            "mismatch_row": 1.0,
        },
        "optimiser": {"steps": STEPS, "lr": 2e-5},
        "run": {"folder": str(folder / "run"), "save_every": STEPS},
        "engine": {
            "kind": "vllm-server",
            "folder": str(folder / "served"),
            "base_url": base_url,
        },
    }
    text = ""
    for name, values in sections.items():
        text += f"[{name}]\n" + "".join(f"{k} = {json.dumps(v)}\n" for k, v in values.items())
    path = folder / "train.toml"
    path.write_text(text, encoding="utf-8")
    return path


def train(folder: Path, model: Path) -> dict[str, Any]:
    """Train against a server, as the documentation says: the first call makes its folder."""
    told = run(
        sys.executable, "tfgrpo", "train", str(settings(folder, model, "http://x/v1")), code=2
    )
    with vllm_cpu.server(folder / "train.log", folder / "served", "--enforce-eager") as url:
        run(sys.executable, "tfgrpo", "train", str(settings(folder, model, url)))
    lines = (folder / "run" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    steps = [json.loads(line) for line in lines]
    return {
        "first_call_says": "vllm serve" in told,
        "steps": len(steps),
        "updates": sum(s["grad_norm"] > 0 for s in steps),
        "mismatch": [round(s["mismatch_mean"], 4) for s in steps if "mismatch_mean" in s],
    }


def measure(folder: Path) -> dict[str, Any]:
    """Run all of it and return the figures."""
    inside = str(vllm_cpu.BIN / "python")
    tied, untied = folder / "tied", folder / "untied"
    run(sys.executable, "tests.vllm.engine_check", "model", str(tied))
    run(sys.executable, "tests.vllm.engine_check", "model", str(untied), "untied")
    figures: dict[str, Any] = {
        "colocated": check(inside, "colocated", str(tied)),
        "colocated_untied": check(inside, "colocated", str(untied)),
        "train": train(folder, untied),
    }
    with vllm_cpu.server(folder / "check.log", untied, "--enforce-eager") as url:
        figures["server_untied"] = check(sys.executable, "server", str(untied), url)
    return figures


def main() -> None:
    """Measure and keep the figures."""
    if not vllm_cpu.is_installed():
        raise SystemExit("there is no .venv-vllm: run `sh tests/vllm/install.sh` first")
    with tempfile.TemporaryDirectory() as name:
        record("vllm_engines", measure(Path(name)), COMMAND)


if __name__ == "__main__":
    main()
