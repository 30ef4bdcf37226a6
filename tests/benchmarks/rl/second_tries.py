"""Second tries and hints within training against plain GRPO, at equal rollouts on the toy.

Tasks are of letters whose right meaning the model rarely draws, so most bare groups fail. Every
rollout counts: drafts, resamples and hinted ones. `lope_plain` is LoPE's control without text;
`grpo_turns` is the base of R3L, which plays a turn a line. Texts that the policy writes are counted
in tokens (`write_tokens`) beside the rollouts, with the share that could not be read.

    python -m tests.benchmarks.rl.second_tries --out rows.jsonl   (--device cuda: larger)
    python -m tests.benchmarks.rl.second_tries --collect rows.jsonl
"""

from __future__ import annotations

from tests.benchmarks.rl.toy.runs import CHAINS, Arm, main


def hints(name: str, **options: object) -> Arm:
    """An arm of a hint method."""
    return Arm({"hints": {"name": name, **options}})


WRITER = {"retries": 1, "writer_tokens": 40}
ARMS: dict[str, Arm] = {
    "grpo": Arm(),
    "sage": hints("sage"),
    "sage_online": hints("sage", rewrite="visit", **WRITER),
    "sage_light": hints("sage_light"),
    "scaf": hints("scaf"),
    "scaf_graft": hints("scaf", graft=True),
    "pope": hints("pope", max_level=3),
    "questa": hints("questa"),
    "igrpo": hints("igrpo", drafts=4, refinements=8),
    "reflection": hints("igrpo", only_failed=True, drafts=8),
    "lope": hints("lope", resamples=8, words=[3, 12]),
    "lope_shaped": hints("lope", resamples=8, words=[3, 12], shaping=0.1, whole_baseline=True),
    "lope_plain": hints("lope", resamples=8, text="none"),
    "xrpo": hints("xrpo"),
    "icpo": hints("icpo", expert=4, bonus_groups=160, groups_per_step=8),
    "scope": hints("scope", writer_tokens=16),
    "nudge": Arm({"hints": {"name": "nudge"}, "loss": {"advantage": "nudge"}}),
    "adhint": hints("adhint", bare=4, hinted=4),
    "stephint": hints("stephint"),
    "bread": hints("bread"),
    "grpo_turns": Arm(turns=True),
    "r3l": Arm(
        {
            "hints": {"name": "r3l", "writer_tokens": 24},
            "loss": {"name": "opmd", "advantage": "r3l"},
        },
        turns=True,
        base="grpo_turns",
    ),
}

if __name__ == "__main__":
    main(__doc__ or "", "second_tries", ARMS, CHAINS)
