"""A made-up run with everything a report shows, hostile texts included."""

from __future__ import annotations

import random
from typing import Any

from tfgrpo.context import Context, ContextPart
from tfgrpo.messages import Message
from tfgrpo.report.view import Decision, RunView
from tfgrpo.rollout import Outcome, Rollout, RolloutGroup, Score, Step, Task, Usage
from tfgrpo.store.fold import SpendRow

HOSTILE = (
    '<script>window.owned = 1</script><img src=x onerror="window.owned=1"> '
    "</script><!-- [link=http://evil] javascript:alert(1) \x1b]0;owned\x07 \u202egnp.exe"
)
LESSONS = (
    "When a message names a parcel, a courier or a date, answer 'delivery' alone.",
    "If money back is asked for in any form, answer 'refund', even where the parcel is late.",
    "Give the label alone: no sentence, no full stop, lower case.",
)

FORECAST = {
    "stages": [
        {
            "stage": stage, "calls_low": calls, "calls_high": 2 * calls, "prompt_low": 900,
            "prompt_high": 90_000, "completion_low": 400, "completion_high": 30_000,
            "cost_low_usd": 0.01, "cost_high_usd": 0.04, "seconds_low": 20.0, "seconds_high": 95.0,
        }
        for stage, calls in (("practice", 384), ("contrast", 20), ("gate", 500), ("test", 192))
    ],
    "min_detectable": 0.1831,
    "keepable": 0.2104,
    "notes": ["24 test tasks find a gain of 0.183 four times in five"],
    "warnings": [],
}  # fmt: skip


def task(i: int) -> Task:
    words = ("parcel", "invoice", "password", "voucher", "courier", "address", "colour", "size")
    rng = random.Random(i)
    said = " ".join(rng.choice(words) for _ in range(12))
    return Task(
        f"msg-{i:03d}",
        f"Which class has this message? {i}: {said}",
        reference="refund",
        metadata={"category": ("delivery", "refund", "account")[i % 3]},
    )


def rollout(rollout_id: str, task_id: str, reward: float | None, text: str) -> Rollout:
    outcome: Outcome = "graded" if reward is not None else "provider_failed"
    return Rollout(
        rollout_id,
        task_id,
        (Step(Message("assistant", text)),),
        outcome,
        None if reward is None else Score(reward, "label matches" if reward else "wrong label"),
        usage=Usage(uncached_tokens=120, text_tokens=30, calls=1, cost_usd=0.0004),
        error="" if reward is not None else "503 from the server",
        duration_s=0.8,
    )


def group(
    i: int, chance: float, size: int, rng: random.Random, metadata: dict[str, Any], lessons: int = 0
) -> RolloutGroup:
    t = task(i)
    name = "-".join(str(metadata.get(k, "")) for k in ("stage", "step", "arm")) + f"-{i}"
    rollouts = []
    for n in range(size):
        reward: float | None = float(rng.random() < chance)
        if rng.random() < 0.03:
            reward = None
        text = "refund" if reward else f"I think this is about delivery {n}."
        if i == 0 and n == 0:
            text = HOSTILE
        rollouts.append(rollout(f"{name}-{n}", t.task_id, reward, text))
    parts = tuple(ContextPart("lesson", LESSONS[j], source=f"E{j + 1}") for j in range(lessons))
    return RolloutGroup(
        f"g{name}", t, tuple(rollouts), Context(parts), "scripted:test", metadata=metadata
    )


def library(n: int, step: int) -> dict[str, Any]:
    return {
        "version_id": f"v{n}",
        "step": step,
        "entries": [
            {
                "experience_id": f"E{j + 1}",
                "kind": "lesson",
                "text": LESSONS[j] if j else LESSONS[j] + HOSTILE,
                "status": "active",
                "trust": "model",
                "created_step": j + 1,
                "shown": 40 - j,
                "provenance": {"group_ids": [f"gpractice-{j}--{j}"], "task_ids": [f"msg-{j:03d}"]},
                "value": {"estimate": 0.1 - 0.08 * j, "low": 0.02 - 0.1 * j, "high": 0.2 - 0.06 * j,
                          "n_tasks": 24, "level": 0.95},
            }
            for j in range(n)
        ],
    }  # fmt: skip


def made_run(
    *, seed: int = 1, lift: float = 0.3, tests: int = 24, draws: int = 4, practice: int = 16
) -> RunView:
    rng = random.Random(seed)
    hard = {i: rng.choice([0.0, 0.2, 0.4, 0.6, 1.0]) for i in range(2000)}
    groups: list[RolloutGroup] = []
    decisions = []
    for step in range(4):
        for i in range(practice):
            chance = min(1.0, hard[i] + lift * step / 4)
            meta = {"stage": "practice", "step": step, "library_version": f"v{min(step, 3)}"}
            groups.append(group(i, chance, 6, rng, meta, lessons=min(step, 3)))
        decisions.append(
            Decision(
                "contrast",
                "",
                {
                    "group_id": groups[-1].group_id,
                    "text": f"Good attempts kept to the label. {HOSTILE}",
                },
            )
        )
        accepted = step != 2
        current, proposed = f"v{min(step, 2)}", f"v{step + 1}"
        arms = [("proposed", proposed, step + 1)] + [("current", current, step)] * (step == 0)
        for i in range(100, 118):
            for arm, version, strength in arms:
                meta = {"stage": "gate", "step": step, "arm": arm, "library_version": version}
                chance = min(1.0, hard[i] + lift * strength / 5)
                groups.append(group(i, chance, draws, rng, meta, lessons=min(strength, 3)))
        gate = {
            "step": step,
            "look": step + 1,
            "current": current,
            "proposed": proposed,
            "accepted": accepted,
            "reason": "lower bound",
            "edits": [{"op": "add", "kind": "lesson", "text": "x"}],
        }
        decisions.append(Decision("gate", f"{step}.{step + 1}", gate))
    for i in range(200, 200 + tests):
        for arm, bonus in (("empty", 0.0), ("final", lift)):
            chance = min(1.0, hard[i] + bonus)
            meta = {"stage": "test", "step": 4, "arm": arm}
            groups.append(group(i, chance, draws, rng, meta, lessons=3 * (arm == "final")))
    decisions += [
        Decision("rejected_edit", "", {"step": 2, "edit": {"op": "add", "text": HOSTILE},
                                       "reason": "repeats a task"}),
        Decision("summary", "", {"group_id": groups[0].group_id,
                                 "rollout_id": groups[0].rollouts[0].rollout_id, "text": HOSTILE}),
        Decision("final", "", {"version_id": "v3", "reason": "best bound"}),
        Decision("forecast", "", FORECAST),
    ]  # fmt: skip
    spend = tuple(
        SpendRow(
            stage,
            "scripted:test",
            Usage(
                uncached_tokens=tokens, text_tokens=tokens // 4, calls=calls, cost_usd=tokens / 1e6
            ),
            Usage(),
            Usage(),
            failed,
            hits,
            12.5,
        )
        for stage, tokens, calls, failed, hits in (
            ("practice", 46_000, 384, 11, 0),
            ("contrast", 21_000, 24, 0, 0),
            ("merge", 4_000, 4, 1, 0),
            ("gate", 69_000, 576, 9, 144),
            ("test", 23_000, 192, 5, 0),
        )
    )
    return RunView(
        name="customer-messages",
        groups=tuple(groups),
        decisions=tuple(decisions),
        libraries=tuple((f"v{n}", library(n, n)) for n in range(4)),
        spend=spend,
        config={
            "learn": {"preset": "default", "seed": 1},
            "policy": {"lm": "scripted:test", "system": "You sort messages of customers."},
        },
        folder="runs/customer-messages",
        instructions="You sort messages of customers.\n\n" + "\n".join(LESSONS),
    )
