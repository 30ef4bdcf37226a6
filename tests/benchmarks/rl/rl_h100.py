"""Whole training steps and rollouts on one GPU: ours beside TRL and `generate`.

The job is `rl_job`'s, the arms are `rl_arms`'s. Each arm runs in a process of its own, so that its
peak memory is its own. Rows go to a JSONL file as they are made; `--collect` turns one or more of
them into the recorded figures. Arms are compared with those of the same `--call` (by default the
time of the start), which is to say on one machine.

    python -m tests.benchmarks.rl.rl_h100 --out rows.jsonl --plan smollm2 --seconds 560
    python -m tests.benchmarks.rl.rl_h100 --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tests.benchmarks.rl.rl_arms import COLOCATED, run_arm
from tests.benchmarks.rl.rl_job import GROUP, PROMPTS
from tests.benchmarks.runs.child import Child, tell

SMALL: dict[str, Any] = {"max_rows": 256, "micro": 45_056, "chunk": 2048, "checkpoint": True}
"""Activations made twice. A small model's update is bound by launches: few large micro-batches."""
QWEN05: dict[str, Any] = {"micro": 7424, "chunk": 2048, "moments": "bfloat16"}
QWEN15: dict[str, Any] = {**QWEN05, "micro": 5632}
PLANS: dict[str, list[tuple[str, str, dict[str, Any]]]] = {
    "smollm2": [
        ("ours", "smollm2", {"steps": 10, **SMALL}),
        ("trl-bf16-liger", "smollm2", {"steps": 9}),
        ("trl-bf16", "smollm2", {"steps": 9}),
        ("trl-bf16-liger", "smollm2", {"steps": 5, "batch": 128}),
        ("ours-skip", "smollm2", {"steps": 5, **SMALL}),
    ],
    "smollm2-rest": [
        ("trl-static", "smollm2", {"steps": 3}),
        ("trl-continuous", "smollm2", {"steps": 3}),
        ("trl-defaults", "smollm2", {"steps": 3}),
    ],
    "rollout": [
        ("rollout-ours", "qwen05", {"rows": 512}),
        ("rollout-ours", "qwen05", {"rows": 64}),
        ("rollout-generate", "qwen05", {"rows": 512}),
        ("rollout-generate", "qwen05", {"rows": 64}),
        ("rollout-static", "qwen05", {"rows": 64}),
    ],
    "qwen05": [("ours", "qwen05", {"steps": 10, **QWEN05}), ("trl-bf16", "qwen05", {"steps": 9})],
    "qwen15": [("ours", "qwen15", {"steps": 10, **QWEN15}), ("trl-bf16", "qwen15", {"steps": 9})],
    **{
        f"colocated-{model}": [
            ("ours", model, {"steps": 6, **own}),
            (COLOCATED, model, {"steps": 6}),
        ]
        for model, own in (("smollm2", SMALL), ("qwen05", QWEN05), ("qwen15", QWEN15))
    },
}

CARDS = {"H100": "", "H200": "_h200"}
"""How the names of a card's figures end."""
NAMES = {
    "smollm2": ("ratio_best_trl", "peak_ratio"),
    "qwen05": ("ratio_trl_qwen05", "peak_ratio_qwen05"),
    "qwen15": ("ratio_trl_qwen15", "peak_ratio_qwen15"),
}
ROLLOUT_RIVALS = {512: ("rollout-generate",), 64: ("rollout-generate", "rollout-static")}
"""By rows; without the last of them there is no figure."""
NO_TIME = "no time left"


def run_plan(plans: list[str], only: str, out: Path, seconds: float, call: str) -> None:
    """Run arms one after another, each in its own process, while time is left."""
    end = time.monotonic() + seconds
    import torch

    card = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
    arms = [arm for plan in plans for arm in PLANS[plan] if arm[0].startswith(only)]
    for arm, model, options in arms:
        left = end - time.monotonic()
        row: dict[str, Any] = {"arm": arm, "model": model, "options": options, "card": card}
        row["call"] = call
        row |= {"error": NO_TIME} if left < 20 else _in_process(arm, model, options, left)
        with out.open("a") as file:
            file.write(json.dumps(row) + "\n")
        print(json.dumps(row)[:900], flush=True)


def _in_process(arm: str, model: str, options: dict[str, Any], left: float) -> dict[str, Any]:
    """An arm's figures, or why there are none with the steps that it made."""
    start = time.monotonic()
    arguments = ["tests.benchmarks.rl.rl_h100", "--arm", arm, "--model", model]
    row = Child([*arguments, "--options", json.dumps(options)]).figures(min(left, 260))
    return row | {"process_s": round(time.monotonic() - start, 1)}


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    rows = [_of_steps(r) for r in rows if r.get("error") != NO_TIME]
    rows.sort(key=lambda r: "error" in r)
    figures: dict[str, Any] = {"rows": rows}
    for card, ending in CARDS.items():
        here = [r for r in rows if card in r["card"]]
        for model, (name, _) in NAMES.items():
            found = _ratio(here, "samples_per_s", "ours", ("trl",), {"model": model})
            if found:
                figures[name + ending] = round(found["ratio"], 2)
                if model == "smollm2":
                    figures["best_trl_arm" + ending] = found["other"]["arm"]
                    figures["mixed_share" + ending] = round(found["ours"]["mixed_share"], 3)
            found = _ratio(here, "samples_per_s", "ours", (COLOCATED,), {"model": model})
            if found:
                figures[name.replace("trl", "colocated") + ending] = round(found["ratio"], 2)
        for n, rivals in ROLLOUT_RIVALS.items():
            found = _ratio(here, "rollout_tokens_per_s", "rollout-ours", rivals, {"rows": n})
            if found and rivals[-1] in {r["arm"] for r in here if "error" not in r}:
                figures[f"ratio_generate_{n}{ending}"] = round(found["ratio"], 2)
    for model, (_, name) in NAMES.items():
        peaks = [_peaks(rows, model, arm) for arm in ("ours", "trl")]
        if all(peaks):
            figures[name] = round(max(peaks[0]) / min(peaks[1]), 3)
    figures["trl_arms_tried"] = sorted({r["arm"] for r in rows if r["arm"].startswith("trl")})
    cards = ", ".join(dict.fromkeys(r["card"] for r in rows))
    record("rl_h100", figures, "python -m tests.benchmarks.rl.rl_h100 --plan smollm2|qwen", cards)


def _ratio(
    rows: list[dict[str, Any]],
    key: str,
    mine: str,
    others: tuple[str, ...],
    same: dict[str, Any],
) -> dict[str, Any]:
    """Ours against the best other arm beside it; of several calls the lowest ratio."""
    found = []
    for call in dict.fromkeys(r["call"] for r in rows):
        here = [r for r in rows if r["call"] == call and key in r and _has(r, same)]
        a = max((r for r in here if r["arm"] == mine), key=lambda r: r[key], default=None)
        rest = [r for r in here if r["arm"].startswith(others)]
        b = max(rest, key=lambda r: r[key], default=None)
        if a and b:
            found.append({"ratio": a[key] / b[key], "ours": a, "other": b})
    return min(found, key=lambda f: f["ratio"], default={})


def _peaks(rows: list[dict[str, Any]], model: str, arm: str) -> list[float]:
    """Peaks of arms whose names start so, of all calls: memory does not change with the day."""
    of = [r for r in rows if r["model"] == model and r["arm"].startswith(arm)]
    return [float(r["peak_gb"]) for r in of if "peak_gb" in r]


def _of_steps(row: dict[str, Any]) -> dict[str, Any]:
    """A row as it is; one that was cut off gets the median of the steps it made, if four or more
    after warm-up."""
    if "error" not in row:
        return row
    steps = row.get("all_step_s", [])[2 if row["arm"].startswith("ours") else 1 :]
    row = {**row, "error": row["error"][:200]}
    if len(steps) < 4:
        return row
    step_s = statistics.median(steps)
    return {**row, "step_s": step_s, "samples_per_s": PROMPTS * GROUP / step_s}


def _has(row: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all({**row, **row["options"]}.get(k) == v for k, v in wanted.items())


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--plan", choices=sorted(PLANS), nargs="+")
    parser.add_argument("--only", default="", help="how the arms' names start")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--seconds", type=float, default=560)
    parser.add_argument("--call", default=time.strftime("%Y%m%d-%H%M%S", time.gmtime()))
    parser.add_argument("--arm")
    parser.add_argument("--model")
    parser.add_argument("--options", default="{}")
    parser.add_argument("--collect", type=Path, nargs="+")
    given = parser.parse_args()
    if given.collect:
        collect(given.collect)
    elif given.arm:
        tell(run_arm(given.arm, given.model, json.loads(given.options)))
    else:
        run_plan(given.plan, given.only, given.out, given.seconds, given.call)


if __name__ == "__main__":
    main()
