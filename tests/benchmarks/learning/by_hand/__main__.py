"""House rules with a capable model by hand: ours and GEPA, one run each.

`python -m tests.benchmarks.learning.by_hand run FOLDER --family bakery --method ours` waits for
answers in FOLDER (`queue_lm`) and writes FOLDER/row.json; `collect FOLDER …` records the rows.
Such figures say what a capable writer learns of our prompts; they are no benchmark of a model.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import JSONResponse

from tests.benchmarks.head_to_head.methods import Learnt
from tests.benchmarks.learning.by_hand.families import HOUSES
from tests.benchmarks.learning.by_hand.queue_lm import Queue, QueueLM
from tests.benchmarks.learning.house_rules import methods
from tests.benchmarks.learning.house_rules.families.family import Case, Family
from tests.benchmarks.learning.house_rules.server import Bench
from tests.benchmarks.record import record
from tfgrpo.config.learn import Config
from tfgrpo.context import Context
from tfgrpo.experience import prompt_context
from tfgrpo.learning.experience_settings import experience_settings
from tfgrpo.learning.learn import learn_async
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Sampling
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import GroupSpec, SampleSettings, sample_groups

PRACTICE, GATE, TEST, DRAWS = 16, 8, 12, 2
SETTINGS = {"policy": {"timeout_s": 7200.0}, "critic": {"timeout_s": 7200.0}}
WAIT = {"timeout_s": 7200.0, "retry_deadline_s": 7200.0}


class HandBench(Bench):
    """The bench with a queue in place of the simulators."""

    def __init__(self, queue: Queue) -> None:
        super().__init__()
        self._queue = queue

    async def _chat(self, request: HttpRequest) -> JSONResponse:
        body = await request.json()
        messages = [{"role": m["role"], "content": str(m["content"])} for m in body["messages"]]
        role = str(body["model"]).rpartition("/")[2]
        answers = await self._queue.ask(role, messages, int(body.get("n") or 1))
        choices = [
            {
                "index": i,
                "message": {"role": "assistant", "content": a},
                "finish_reason": "stop",
            }
            for i, a in enumerate(answers)
        ]
        usage = {"prompt_tokens": 1, "completion_tokens": 1, "total_tokens": 2}
        return JSONResponse(
            {"id": "c", "object": "chat.completion", "created": 0, "model": role,
             "choices": choices, "usage": usage}
        )  # fmt: skip


def _job(family: Family, seed: int) -> tuple[methods.Job, tuple[Case, ...]]:
    split = family.draw(seed, PRACTICE, GATE, TEST)
    arm = methods.ARMS["lessons"]
    settings = {**SETTINGS, "run": {}}
    return methods.Job(family, split.practice, split.gate, 0.0, seed, arm, settings), split.test


async def learn_ours(job: methods.Job, queue: Queue, folder: Path) -> Learnt:
    """Learn with the default preset, lessons alone."""
    cases = [*job.practice, *job.gate]
    values = methods.our_config("default", job, str(folder))
    values["run"] |= WAIT
    config = Config.from_mapping(values)
    result = await learn_async(
        config,
        tasks=[methods.as_task(c, reference=True) for c in cases],
        verifier=methods.HouseVerifier(job.family, cases, tell=True),
        opener=lambda spec, **options: QueueLM(queue, spec.removeprefix("scripted:")),
    )
    version, settings = result.learned.version, experience_settings(config)

    def context(task: Task) -> Context:
        return prompt_context(
            version.library, settings, use="deployment", task=task, selector=version.selector
        )

    return Learnt(job.family.system, context, f"{len(version.library.shown)} entries")


async def learn_gepa(job: methods.Job, queue: Queue) -> Learnt:
    """Learn with GEPA 0.1.4: 150 metric calls, minibatches of 6."""
    bench = HandBench(queue)
    methods.DEADLINE_S = 7200.0
    async with bench.running():
        return await methods.learn_rival("gepa", job, bench, "hand")


async def _test(
    learnt: Learnt, family: Family, test: tuple[Case, ...], queue: Queue
) -> list[RolloutGroup]:
    return await sample_groups(
        [methods.as_task(c, reference=False) for c in test],
        ChatPolicy(QueueLM(queue, "policy"), system=learnt.system, sampling=Sampling()),
        methods.HouseVerifier(family, test, tell=False),
        context=learnt.context,
        draws=GroupSpec(DRAWS, scope="test", stage="test"),
        settings=SampleSettings(concurrency=64, on_truncated="grade", timeout_s=7200.0),
    )


def _figures(groups: list[RolloutGroup]) -> tuple[float, float]:
    rewards = [r for g in groups for r in g.rewards_G]
    return sum(rewards) / len(rewards), sum(r == 1.0 for r in rewards) / len(rewards)


async def run(folder: Path, family_name: str, method: str, seed: int) -> dict[str, Any]:
    """Learn, test with and without what was learnt, and write the row."""
    family = HOUSES[family_name]
    job, test = _job(family, seed)
    queue = Queue(folder, family.system)
    learnt = await (learn_ours(job, queue, folder) if method == "ours" else learn_gepa(job, queue))
    rollouts, critic_calls = queue.account.calls["policy"], queue.account.calls["critic"]
    learning_tokens = queue.account.tokens
    bare, told = await asyncio.gather(
        _test(Learnt(family.system), family, test, queue), _test(learnt, family, test, queue)
    )
    (empty, _), (library, all_right) = _figures(bare), _figures(told)
    row = {
        "family": family_name,
        "method": method,
        "empty": round(empty, 3),
        "library": round(library, 3),
        "all_right": round(all_right, 3),
        "captured": round((library - empty) / (1 - empty), 3),
        "rollouts": rollouts,
        "critic_calls": critic_calls,
        "tokens": learning_tokens,
        "note": learnt.note,
    }
    (folder / "row.json").write_text(json.dumps(row, indent=1))
    (folder / "finished").touch()
    return row


def main() -> None:
    """Run one arm, or record what arms wrote."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("verb", choices=("run", "collect"))
    parser.add_argument("folder", type=Path, nargs="+")
    parser.add_argument("--family", choices=sorted(HOUSES), default="bakery")
    parser.add_argument("--method", choices=("ours", "gepa"), default="ours")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    command = "python -m tests.benchmarks.learning.by_hand"
    if options.verb == "run":
        row = asyncio.run(run(options.folder[0], options.family, options.method, options.seed))
        print(json.dumps(row))
        return
    rows = [json.loads((f / "row.json").read_text()) for f in options.folder]
    record("by_hand", {"rows": rows, "practice": PRACTICE, "gate": GATE, "test": TEST}, command)


if __name__ == "__main__":
    main()
