"""The page docs/rl_registry.md, made from the registries: python -m tests.rl.formulas.table"""

from __future__ import annotations

import inspect
from pathlib import Path

from tests.benchmarks.rl.rl_registry import REGISTRIES
from tfgrpo.rl.formulas.registry import Entry

DOCUMENT = Path(__file__).parents[3] / "docs" / "rl_registry.md"

HEAD = """# Losses, aggregations, advantages, rewards, credit

Every variant is a pure function under one name, with its source, its formula, how sure the formula
is, and a test that compares it with a closed form or brute force. Choose them in `tfgrpo train` by
name: `loss.name`, `loss.aggregation`, `loss.advantage`, `rewards.names` (applied in that order)
and `credit.name` (in place of the advantage), with options by keyword in `loss.options`,
`loss.advantage_options`, `rewards.options.NAME` and `credit.options`.

**How sure**: *code* = the rule was read in released code; *paper* = in the paper's text;
*approximation* = our reading of an abstract, a summary or from memory, never a reproduction;
*own* = a plain rule of ours.

**Checked**: what the function was compared with, and what differs. *State*: numbers that move from
step to step, in the checkpoint and in the log as `state_ENTRY_NAME` (RiskPO's quantiles, R2VPO's
multiplier, VCPO's step size).

**Needs**: what a function must be given besides log-probs, advantages, rewards and lengths. A
missing input is an error that names it. `every_row`: rows of advantage 0 have a gradient too and
are not skipped. `sequence`, `group`: the loss of a token depends on its whole row or group, which
is kept in one micro-batch. `extra:NAME`: a column, described in the function's docstring.

**What `tfgrpo train` supplies.** Log-probs and entropies cost one pass over the step's rows, and
only where something in use asks for them. What needs a setting is refused without it, before a
model is loaded:

| need | set |
|---|---|
| `ratio` (losses) | nothing; under one update per batch it is 1, and the run says so |
| `rewards` (losses) | nothing; advantages have no effect, and the run says so where one is set |
| `steps`, `states`, `extra:tool_calls_R`, `extra:invalid_R` | `[multi_turn]`: several turns |
| `step_rewards` | `multi_turn.environment`, or a verifier function with parts `step_0`, … |
| `parts` | a verifier of kind `weighted` or `function` |
| `behaviour`, `extra:ratio_R` | `rollout.temperature = 1`, where samplers tell log-probs |
| `extra:round_R` | a verifier of kind `arena` |
| `baseline` | no `[hints]`: one greedy rollout a task is added |
| `extra:context_R` | `[hints]` |
| `given` (losses) | one turn, no `[hints]`; tasks with a reference or `metadata.solution` |
| `verdicts` (losses) | a verifier of kind `win_rate` with `verdicts = true` |
| `passes` (losses) | `epochs_per_batch` 2 or more |
| `half_step` (losses) | `epochs_per_batch` and `updates_per_epoch` 1, no replay |
| `extra:planning_D` | `credit.phrases` |
| any other column `NAME_R` | `features.NAME_R`, a source as below |

A column's source is `task:KEY` or `rollout:KEY` (of the metadata), `part:NAME` (of the score),
`length`, `entropy` or `logp` (means over the tokens). `answers` are compared as
`loss.answer_pattern` finds them. A column `step_rewards` never holds the rollout's outcome:
credits add it to the last step, so that an environment pays for steps and the verifier for the
result. An entry may *use* a need: it takes what is there and does without elsewhere. Options
called `step`, `steps`, `progress` and `max_tokens` are filled in. `logp` is log π at the
rollout's temperature, `extra:score_norm_R` the norm of ∇log π by the logits. For a loop of your
own:

```python
from dataclasses import replace
from tfgrpo.rl.formulas.inputs import RewardBatch
from tfgrpo.rl.formulas.credit import CREDIT, rows_of
from tfgrpo.rl.formulas.rewards import REWARDS

shaped = REWARDS["overlong_soft"].fn(batch, max_tokens=1024, buffer=128)
advantage_D = CREDIT["gigpo"].fn(replace(batch, reward_R=shaped), gamma=0.95)
per_row = rows_of(batch, advantage_D)  # one tuple a row, for TrainRow.advantage
```

**Names** mean one thing. `bnpo` is the paper's Beta-normalised advantage, not the token normaliser
that another library calls so (which depends on how a batch is cut, and is not offered).
`gtpo_trajectory` and `dcpo_distribution` carry a second word because two papers share the first.
`token_mean` counts the tokens of the whole optimiser batch, never of a micro-batch.

A loss of a whole row repeats its value on the row's tokens; `row_mean` then gives the mean over
rows, and is what such a loss takes where `loss.aggregation` is empty (column *aggregation*).
`clip_cov` and `kl_cov` take their statistics by group instead of by micro-batch, so that cutting
the batch differently changes nothing. `mc_grpo` divides by the standard deviation: the released
median deviation is 0 for binary rewards in every odd group."""

TITLES = {
    "losses": "Losses (`rl/formulas/losses`): one value per token",
    "aggregations": "Aggregations (`rl/formulas/aggregations.py`): one weight per row",
    "advantages": "Advantages (`rl/formulas/advantages`): one value per rollout",
    "rewards": "Rewards (`rl/formulas/rewards`): new rewards, one per rollout",
    "credit": "Credit (`rl/formulas/credit`): one advantage per token",
}


KEYS = {
    "losses": 'loss.name = "{}"',
    "aggregations": 'loss.aggregation = "{}"',
    "advantages": 'loss.advantage = "{}"',
    "rewards": 'rewards.names = ["{}"]',
    "credit": 'credit.name = "{}"',
}
"""How a run chooses an entry."""


def options_of(entry: Entry) -> str:
    """The keyword options with their defaults."""
    shown = []
    for parameter in inspect.signature(entry.fn).parameters.values():
        if parameter.kind is parameter.KEYWORD_ONLY and parameter.name != "next_gap_D":
            default = parameter.default
            is_bare = default is parameter.empty
            shown.append(
                parameter.name
                if is_bare
                else f"{parameter.name}={default:.6g}"
                if isinstance(default, int | float)
                else f"{parameter.name}={default}"
            )
        elif parameter.kind is parameter.VAR_KEYWORD:
            shown.append("weight_NAME=1")
    return ", ".join(shown)


def rendered() -> str:
    """The whole page."""
    parts = [HEAD]
    for kind, registry in REGISTRIES.items():
        sure = sum(not e.is_approximation for e in registry.values())
        parts.append(
            f"\n## {TITLES[kind]}\n\n{len(registry)} entries, {sure} not approximations.\n"
        )
        heads = (
            "name | formula | in TOML | options | needs | aggregation | how sure | source | checked"
        )
        parts.append(f"| {heads} |")
        parts.append("|---|---|---|---|---|---|---|---|---|")
        for name, e in registry.items():
            cells = [
                f"`{name}`",
                e.formula,
                f"`{KEYS[kind].format(name)}`",
                options_of(e),
                ", ".join([*e.needs, *(f"uses {need}" for need in e.uses)]),
                e.aggregation,
                e.certainty + (", state" if e.after_step else ""),
                e.source,
                e.checked,
            ]
            parts.append("| " + " | ".join(c.replace("|", "\\|") for c in cells) + " |")
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(rendered(), encoding="utf-8")
    print(f"wrote {DOCUMENT}")
