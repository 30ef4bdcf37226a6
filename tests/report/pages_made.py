"""Every kind of page that a person meets, made of made-up runs, in a folder or served.

Does not know browsers. `tests/report/readable.py` looks at them.
"""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from examples.tool_world_search import CONTEXT, TASKS, make_world, walk
from tests.report.made import made_run
from tfgrpo.diagnosis.progress import ProgressFile
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import Sampling
from tfgrpo.report.page import render_page
from tfgrpo.report.served import serve_all, serve_live
from tfgrpo.report.served.routing import render_routing
from tfgrpo.report.view import Decision, RunView
from tfgrpo.routing.backtest.decisions import Standing
from tfgrpo.runtime.event_loop import run_sync
from tfgrpo.sampling import Progress
from tfgrpo.search import CheckedExpander, PlanMemory, SearchSettings, search_tree
from tfgrpo.search.proposers.lm import LMExpander
from tfgrpo.search.views import to_html
from tfgrpo.store.budget import Budget
from tfgrpo.store.journal import Journal


@contextmanager
def pages(folder: Path) -> Iterator[Mapping[str, str]]:
    """Make every page; yields its address by name."""
    root = folder / "runs"
    root.mkdir(parents=True)
    record(made_run(tests=12, practice=8), root / "customer-messages")
    record(not_kept(), root / "nothing-kept")
    training(root / "train")
    escalation(root / "customer-messages" / "escalate")
    (root / "errand.html").write_text(tree(), encoding="utf-8")
    (root / "routing.html").write_text(routing(), encoding="utf-8")
    unfinished(root / "going-on")
    for name, view in (("report", made_run()), ("nothing_kept", not_kept())):
        (folder / f"{name}.html").write_text(render_page(view), encoding="utf-8")
    report = (folder / "report.html").as_uri()
    with ExitStack() as open_now:
        everything = open_now.enter_context(serve_all(root)).url
        live = open_now.enter_context(serve_live(root / "going-on")).url
        yield {
            "report": report,
            "group": report + "#group=100",
            "nothing_kept": (folder / "nothing_kept.html").as_uri(),
            "live": live,
            "view": everything,
            "training": everything + "training/train/",
            "escalation": everything + "escalation/customer-messages%2Fescalate/",
            "tree": everything + "search/errand.html/",
            "router": everything + "routing/routing.html/",
        }


def record(view: RunView, folder: Path) -> None:
    """Write a made-up run's journal."""
    with Journal.open(folder, create=True, config=dict(view.config)) as store:
        for group in view.groups:
            store.record_group(group)
        for version, payload in view.libraries:
            store.record_library(version, payload)
        for decision in view.decisions:
            store.record_decision(decision.kind, decision.payload, decision.key)


def not_kept() -> RunView:
    """Return a run that kept nothing: the gate let nothing through."""
    view = made_run(lift=0.0, tests=10, practice=6)
    gates = [
        replace(d, payload={**d.payload, "accepted": False, "reason": "not better beyond noise: "
                            "+0.02 (at worst -0.14)"})
        if d.kind == "gate" else d
        for d in view.decisions
        if d.kind != "final"
    ]  # fmt: skip
    final = Decision("final", "", {"version_id": "empty", "reason": "no version was better"})
    calls = {"calls": 8, "failed": 0, "cut": 8}
    step = Decision("step", "0", {"step": 0, "calls": calls, "outcomes": [], "notes": []})
    decisions = (*gates, step, final)
    return replace(view, name="nothing-kept", decisions=decisions, instructions="")


def unfinished(folder: Path) -> None:
    """Write a run in the middle of its gate, with what it says of itself."""
    view = made_run(tests=2, practice=8)
    groups = [g for g in view.groups if g.metadata["stage"] != "test" and g.metadata["step"] < 2]
    kinds = [d for d in view.decisions if d.kind == "forecast"]
    record(replace(view, groups=tuple(groups), decisions=tuple(kinds)), folder)
    now = iter(range(0, 400, 10))
    file = ProgressFile(folder, lambda: 4e9 + next(now))
    for done in range(0, 49, 8):
        file.update(Progress("practice", done, 48, 1, 8 if done < 48 else 0), "96 calls, $0.02")
    for done in range(0, 72, 18):
        file.update(Progress("gate", done, 144, 0, 6), "214 calls, 61,200 tokens, $0.0412")


def training(folder: Path) -> None:
    """Write what a training run of forty steps has written after thirty-one."""
    folder.mkdir(parents=True)
    rng = random.Random(3)
    rows, samples = [], []
    for step in range(1, 32):
        reward = 0.75 - 0.55 * math.exp(-step / 12) + rng.uniform(-0.05, 0.05)
        rows.append(
            {
                "step": step, "reward_mean": reward, "informative_share": 0.9 - step / 60,
                "truncated_share": max(0.0, 0.4 - step / 40), "graded_share": 1.0,
                "grad_norm": 2 * math.exp(-step / 20) + rng.uniform(0, 0.2),
                "length_mean": 40 + step, "length_max": 96, "entropy": 1.2 * math.exp(-step / 30),
                "seconds": 31.0, "rollout_seconds": 22.0, "update_seconds": 9.0,
            }
        )  # fmt: skip
        replies = [{"text": "The order is 4711.", "reward": 1.0, "cut": False},
                   {"text": "I think the order might be", "reward": 0.0, "cut": True}]  # fmt: skip
        group = {"task_id": f"msg-{step:03d}", "prompt": "Which order is it?", "replies": replies}
        samples.append({"step": step, "groups": [group], "of_steps": 40})
    gain = {"estimate": 0.31, "low": 0.12, "high": 0.47, "n_tasks": 24, "level": 0.95}
    scores = [(0, 0.22, {}), (15, 0.41, {"gain": gain | {"estimate": 0.19}}), (30, 0.53,
              {"gain": gain})]  # fmt: skip
    held_out = [
        {"step": s, "mean": m, "low": m - 0.11, "high": m + 0.12, "tasks": 24, **more}
        for s, m, more in scores
    ]
    for name, lines in (("metrics", rows), ("samples", samples), ("evaluations", held_out)):
        text = "".join(json.dumps(row) + "\n" for row in lines)
        (folder / f"{name}.jsonl").write_text(text, encoding="utf-8")


def escalation(folder: Path) -> None:
    """Write what an escalation ends with."""
    folder.mkdir(parents=True)

    def span(middle: float, half: float) -> dict[str, float]:
        return {"estimate": middle, "low": middle - half, "high": middle + half, "n_tasks": 40}

    row = {
        "kept": "distilled",
        "choice": "gate tasks",
        "model": "local:runs/customer-messages/escalate/model",
        "verdict": {"text": "verdict met beyond noise: gain 0.210 (95% interval 0.110 to 0.300)"},
        "arms": {"base": span(0.08, 0.06), "base_library": span(0.31, 0.1),
                 "trained": span(0.29, 0.1), "trained_library": span(0.36, 0.11)},
        "differences": {"training": span(0.21, 0.09), "library_on_base": span(0.23, 0.1),
                        "library_on_trained": span(0.07, 0.08)},
    }  # fmt: skip
    (folder / "escalate.json").write_text(json.dumps(row), encoding="utf-8")


def tree() -> str:
    """Return the page of a search for one errand of the example."""
    task = TASKS[0]
    world = make_world(task)
    memory = PlanMemory()
    memory.add(["go", "take", "go", "give"], task_id="the worked example")
    expander = LMExpander(
        ScriptedLM(walk, model_id="scripted:walker"), world.specs, form="text",
        describe_tools=False, sampling=Sampling(temperature=0.7, max_tokens=20),
    )  # fmt: skip
    result = run_sync(
        lambda: search_tree(
            task, CheckedExpander(expander, world.check), world, algorithm="astar", memory=memory,
            context=CONTEXT, settings=SearchSettings(samples=8, execution="eager", merge="any"),
            budget=Budget(expansions=15, calls=60, depth=6),
        )
    )  # fmt: skip
    facts = {"stopped": result.stop_reason, **result.counters}
    return to_html(result.fold.tree, best=result.best.id, title=task.task_id, facts=facts)


def routing() -> str:
    """Return the page of a router's replay."""
    curves = {
        "ours": [(0.0002, 0.61), (0.0006, 0.74), (0.0018, 0.83), (0.004, 0.87)],
        "ridge": [(0.0002, 0.61), (0.0012, 0.74), (0.004, 0.85)],
        "weighted_knn": [(0.0002, 0.61), (0.001, 0.7), (0.004, 0.85)],
        "single models": [(0.0002, 0.61), (0.0011, 0.7), (0.004, 0.85)],
        "oracle": [(0.0002, 0.61), (0.0005, 0.84), (0.0012, 0.94)],
    }
    models = [("small-8b", 0.0002, 0.61), ("middle-70b", 0.0011, 0.7), ("large", 0.004, 0.85)]
    nothing = (0.0, 0.0, 0.0)
    standing = {
        name: Standing(quality, gap, (gap - 0.1, gap + 0.1), area, (area, area), nothing, nothing)
        for name, quality, gap, area in (("ours", 0.87, 0.22, 0.79), ("ridge", 0.85, 0.0, 0.75))
    }
    return render_routing("Routing with 64 labels a model", curves, models, standing)
