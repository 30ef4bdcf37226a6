"""From examples to trained weights: learn, ask for advice, escalate, compare.

    python examples/escalate/run.py              the whole way, minutes on two CPU cores
    python examples/escalate/run.py --short      a few tasks, under a minute; proves nothing

The embedded model (135 million parameters) reads customers' messages to a shop, with the tasks and
the verifier of `examples/customer_messages`. `learn` finds worked examples that help, `advise` says
which lever pays next, `escalate` trains the examples into the weights and compares base and
trained, with and without the library, on test tasks that nothing has seen. The same on the
command line:

    tfgrpo learn examples/customer_messages/config.toml
    tfgrpo advise demo-run
    tfgrpo escalate demo-run --modules examples/customer_messages --dry-run
    tfgrpo escalate demo-run --modules examples/customer_messages
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from tfgrpo import Config, learn
from tfgrpo.escalate import Escalated, EscalateSettings, escalate
from tfgrpo.learning.progress import PlainView, QuietView
from tfgrpo.report.advise import advise
from tfgrpo.report.view import load_view
from tfgrpo.runtime.import_string import add_module_folder
from tfgrpo.tasks.files import read_tasks

MESSAGES = Path(__file__).resolve().parents[1] / "customer_messages"
SHORT = (
    "tasks.practice=6",
    "tasks.gate=3",
    "tasks.test=3",
    "learn.batch=6",
    "learn.group_size=2",
    'learn.entries="exemplars"',
    "learn.settings.exemplars=2",
    "gate.enabled=false",  # three tasks could not show a gain: what is found is kept, unproven
    "gate.test_group_size=1",
    "policy.sampling.max_tokens=8",
)
"""Settings of the short version: it shows that everything runs, its figures mean nothing."""
SHORT_ESCALATION = {
    "method": "supervised",
    "epochs": 1,
    "looks": 1,
    "draws": 2,
    "gate_draws": 1,
    "grpo_steps": 0,
}


def main(arguments: Sequence[str] | None = None) -> Escalated:
    """Run the example and return what the escalation came to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument("--folder", default="escalate-run", help="of the learning run")
    parser.add_argument("--seed", type=int, default=1, help="of learning and training")
    parser.add_argument("--short", action="store_true", help="a few tasks, under a minute")
    parser.add_argument("--set", action="append", default=[], help="escalation setting name=value")
    given = parser.parse_args(arguments)
    add_module_folder(MESSAGES)

    overrides = [f"run.folder={given.folder!r}", f"learn.seed={given.seed}"]
    config = Config.from_toml(
        MESSAGES / "config.toml", [*overrides, *(SHORT if given.short else ())]
    )
    learnt = learn(config, view=QuietView() if given.short else PlainView())
    print(f"learnt: {len(learnt.library.shown)} entries kept; {learnt.learned.choice.reason}")

    view = load_view(learnt.folder, stages=("practice", "gate"), shown=0)
    for rank, advice in enumerate(advise(view.figures), 1):
        print(f"advice {rank}: {advice.headline} [{advice.kind}] {advice.gain or ''}")

    asked = dict(pair.split("=", 1) for pair in given.set)
    values = {"seed": given.seed, **(SHORT_ESCALATION if given.short else {}), **asked}
    tasks = read_tasks(config.tasks.path)
    result = escalate(learnt.folder, EscalateSettings.of(**values), say=tell, tasks=tasks)
    print("\n".join(result.lines()))
    return result


def tell(line: str) -> None:
    """Show progress beside the result."""
    print(line, file=sys.stderr)


if __name__ == "__main__":
    main()
