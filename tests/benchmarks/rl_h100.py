"""Whole training steps and rollouts on one GPU: ours beside TRL and `generate`.

The job is `rl_job`'s, the arms are `rl_arms`'s. Each arm runs in a process of its own, so that its
peak memory is its own. Rows go to a JSONL file as they are made; `--collect` turns one or more of
them into the recorded figures. Arms are compared with those of the same `--call` (by default the
time of the start), which is to say on one machine.

    python -m tests.benchmarks.rl_h100 --out rows.jsonl --plan smollm2 --seconds 560
    python -m tests.benchmarks.rl_h100 --collect rows.jsonl
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from tests.benchmarks.child import Child, tell
from tests.benchmarks.record import record
from tests.benchmarks.rl_arms import run_arm

SMALL = {"max_rows": 256, "micro": 45_056, "chunk": 2048, "checkpoint": True}
"""Activations made twice. A small model's update is bound by launches: few large micro-batches."""
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
    "qwen05": [
        ("ours", "qwen05", {"steps": 10, "micro": 7424, "chunk": 2048, "moments": "bfloat16"}),
        ("trl-bf16", "qwen05", {"steps": 9}),
    ],
    "qwen15": [
        ("ours", "qwen15", {"steps": 10, "micro": 6272, "chunk": 2048, "moments": "bfloat16"}),
        ("trl-bf16", "qwen15", {"steps": 9}),
    ],
}


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
    arguments = ["tests.benchmarks.rl_h100", "--arm", arm, "--model", model]
    row = Child([*arguments, "--options", json.dumps(options)]).figures(min(left, 260))
    return row | {"process_s": round(time.monotonic() - start, 1)}


def collect(paths: list[Path]) -> None:
    """Turn rows into the recorded figures."""
    rows = [json.loads(line) for p in paths for line in p.read_text().splitlines()]
    rows = [r for r in rows if r.get("error") != NO_TIME]
    good = [r for r in rows if "error" not in r]
    rows = good + [{**r, "error": r["error"][:200]} for r in rows if "error" in r]

    def ratio(key: str, mine: str, others: tuple[str, ...], **same: Any) -> dict[str, Any]:
        """Ours against the best other arm beside it; of several calls the lowest ratio."""
        found = []
        for call in dict.fromkeys(r["call"] for r in good):
            here = [r for r in good if r["call"] == call and _has(r, same)]
            a = max((r for r in here if r["arm"] == mine), key=lambda r: r[key], default=None)
            rest = [r for r in here if r["arm"].startswith(others)]
            b = max(rest, key=lambda r: r[key], default=None)
            if a and b:
                found.append({"ratio": a[key] / b[key], "ours": a, "other": b})
        return min(found, key=lambda f: f["ratio"], default={})

    def smallest_trl(model: str) -> float:
        """The lowest peak of all TRL's arms, of any call: memory does not change with the day."""
        of = [r for r in good if r["arm"].startswith("trl") and r["model"] == model]
        return min(float(r["peak_gb"]) for r in of)

    figures: dict[str, Any] = {"rows": rows}
    whole = ratio("samples_per_s", "ours", ("trl",), model="smollm2")
    if whole:
        ours, trl = whole["ours"], whole["other"]
        figures["ratio_best_trl"] = round(whole["ratio"], 2)
        figures["best_trl_arm"] = trl["arm"]
        figures["peak_ratio"] = round(ours["peak_gb"] / smallest_trl("smollm2"), 3)
        figures["mixed_share"] = round(ours["mixed_share"], 3)
    for n in (512, 64):
        found = ratio(
            "rollout_tokens_per_s", "rollout-ours", ("rollout-generate", "rollout-static"), rows=n
        )
        if found:
            figures[f"ratio_generate_{n}"] = round(found["ratio"], 2)
    for model in ("qwen05", "qwen15"):
        found = ratio("samples_per_s", "ours", ("trl",), model=model)
        if found:
            figures[f"ratio_trl_{model}"] = round(found["ratio"], 2)
            peak = found["ours"]["peak_gb"] / smallest_trl(model)
            figures[f"peak_ratio_{model}"] = round(peak, 3)
    figures["trl_arms_tried"] = sorted({r["arm"] for r in rows if r["arm"].startswith("trl")})
    card = next((r["card"] for r in good), "")
    record("rl_h100", figures, "python -m tests.benchmarks.rl_h100 --plan smollm2|qwen", card)


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
