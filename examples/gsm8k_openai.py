"""Learn lessons for grade-school arithmetic against any OpenAI-compatible server.

    tfgrpo serve-model local:smollm2-135m --port 8000 &
    python examples/gsm8k_openai.py --lm 'http://127.0.0.1:8000/v1#smollm2-135m'

Tasks come from GSM8K's training items where the folder named by TFGRPO_SHARED holds them
(`data/math/gsm8k/train_first1000.jsonl`), else from a few of our own. Settings stand in
`gsm8k_openai.toml`; `--set section.key=value` overrides them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from collections.abc import Sequence
from pathlib import Path

from tfgrpo import Config, Result, Task, learn

HERE = Path(__file__).resolve().parent
STORIES = (
    "{a} crates hold {b} melons each, and {c} melons are eaten. How many melons are left?",
    "A ticket costs {b} coins. {a} friends buy one each and pay {c} coins more for maps. "
    "How many coins do they pay in all?",
    "{a} boats carry {b} people each, and {c} people wait on the pier. How many people is that?",
    "A baker fills {a} trays with {b} buns and gives {c} buns away. How many buns can be sold?",
    "Each of {a} rows has {b} chairs. {c} chairs are broken. How many chairs can be used?",
)
SIGNS = (-1, 1, 1, -1, -1)


def own_tasks(n: int) -> list[Task]:
    """Return n made-up word problems."""
    tasks = []
    for i in range(n):
        rng = random.Random(i)
        a, b, c = rng.randint(3, 19), rng.randint(4, 25), rng.randint(1, 11)
        text = STORIES[i % len(STORIES)].format(a=a, b=b, c=c)
        result = str(a * b + SIGNS[i % len(SIGNS)] * c)
        tasks.append(Task(f"own-{i}", text, reference=result))
    return tasks


def gsm8k_tasks(n: int) -> list[Task]:
    """Return n training items of GSM8K (Cobbe et al., 2021), or our own where it is absent."""
    shared = Path(os.environ.get("TFGRPO_SHARED", HERE.parent / ".." / "shared"))
    path = shared / "data" / "math" / "gsm8k" / "train_first1000.jsonl"
    if not path.is_file():
        return own_tasks(n)
    rows = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    chosen = random.Random(0).sample(range(len(rows)), n)
    return [Task(f"gsm8k-{i}", rows[i]["question"], rows[i]["final"]) for i in sorted(chosen)]


def show(result: Result) -> None:
    """Print what was learnt and what it is worth on tasks that nothing learnt from."""
    for entry in result.library.shown:
        print(f"kept {entry.experience_id}: {' '.join(entry.body.split())[:200]}")
    for name, score in (("empty", result.empty_score), ("kept", result.library_score)):
        if score is not None:
            print(
                f"test, {name} library: {score.estimate:.3f} ({score.low:.3f} to {score.high:.3f})"
            )
    if result.verdict is not None:
        print(result.verdict.text)
    print(f"everything that was paid for is in {result.folder}")


def main(arguments: Sequence[str] | None = None) -> Result:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm", default="", help="spec of the model, such as http://HOST/v1#NAME")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    asked = parser.parse_args(arguments)
    overrides = [*([f"policy.lm={asked.lm}"] if asked.lm else []), *asked.set]
    config = Config.from_toml(HERE / "gsm8k_openai.toml", overrides)
    sizes = config.tasks
    total = (sizes.practice or 0) + (sizes.gate or 0) + (sizes.test or 0)
    result = learn(config, tasks=gsm8k_tasks(total))
    show(result)
    return result


if __name__ == "__main__":
    raise SystemExit(main().exit_code)
