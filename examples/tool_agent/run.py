"""A tool-using agent learns how its tools want to be used.

    python examples/tool_agent/run.py                       offline, a scripted model
    python examples/tool_agent/run.py --lm openai:MODEL     a real one

The scripted agent looks the parcel up and asks for the postage. It mostly passes grams on as
kilograms, and mostly converts once a lesson tells it to; its critic compares the attempts by what
they passed. The loop, the tools, the verifier, the gate and the journal are the real ones.
"""

from __future__ import annotations

import argparse
import json
import random
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tfgrpo import Config, Result, learn, open_lm
from tfgrpo.messages import ToolCall
from tfgrpo.protocols import LM, Completion, Request
from tfgrpo.runtime.import_string import add_module_folder
from tfgrpo.testing import ScriptedLM

HERE = Path(__file__).resolve().parent
LESSON = "Divide a weight by 1000 before asking for postage: the register keeps grams"


def call(name: str, **arguments: Any) -> Completion:
    """Return a reply that asks for one tool."""
    asked = ToolCall(f"call-{name}", name, json.dumps(arguments))
    return Completion("", finish="tool_calls", tool_calls=(asked,))


def act(request: Request, seed: int | None) -> Completion:
    """Look the parcel up, ask for the postage, answer."""
    results = [m.content for m in request.messages if m.role == "tool"]
    question = next(m.content for m in request.messages if m.role == "user")
    if not results:
        return call("find_parcel", parcel_id=re.findall(r"P\d+", question)[0])
    if len(results) == 1:
        parcel = json.loads(results[0])
        taught = any(LESSON in m.content for m in request.messages if m.role == "system")
        careful = random.Random(seed).random() < (0.95 if taught else 0.3)
        weight = parcel["weight"] / (1000 if careful else 1)
        return call("postage", weight_kg=weight, country=parcel["country"])
    return Completion(f"The postage is {float(results[1]):.2f}")


def compare(request: Request, seed: int | None) -> Completion:
    """Give the lesson where some attempt passed kilograms: a number with a small value."""
    weights = re.findall(r'"weight_kg": ?([0-9.]+)', request.messages[-1].content)
    found = any(float(w) < 10 for w in weights)
    lessons = [{"lesson": LESSON, "attempts": [1]}] if found else []
    return Completion(json.dumps({"lessons": lessons}))


def scripted(spec: str, **options: Any) -> LM:
    """Stand in for `open_lm`: an agent where there are tools, a critic elsewhere."""

    def reply(request: Request, seed: int | None) -> Completion:
        return act(request, seed) if request.tools else compare(request, seed)

    return ScriptedLM(reply, model_id="scripted:parcel-desk")


def main(arguments: Sequence[str] | None = None) -> Result:
    """Run the example."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lm", default="", help="spec of a real model; scripted without")
    parser.add_argument("--set", action="append", default=[], help="section.key=value")
    asked = parser.parse_args(arguments)
    offline = ["policy.lm=scripted:parcel-desk", "learn.settings.summarise=never"]
    model = [f"policy.lm={asked.lm}"] if asked.lm else offline
    config = Config.from_toml(HERE / "config.toml", [*model, *asked.set])
    add_module_folder(HERE)  # `tfgrpo learn` does this for the config's folder
    result = learn(config, opener=open_lm if asked.lm else scripted)
    for entry in result.library.shown:
        print(f"kept {entry.experience_id}: {entry.body}")
    if result.empty_score and result.library_score and result.verdict:
        print(f"test: {result.empty_score.estimate:.3f} → {result.library_score.estimate:.3f}")
        print(result.verdict.text)
    return result


if __name__ == "__main__":
    raise SystemExit(main().exit_code)
