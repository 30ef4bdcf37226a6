"""The index of published systems: what each adds, where it is here, how sure, how it is reached.

How sure a formula is comes from the registry, so that the index cannot say more than the code.
`python -m tests.docs.papers` writes docs/papers.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from tfgrpo.rl.formulas.advantages import ADVANTAGES
from tfgrpo.rl.formulas.credit import CREDIT
from tfgrpo.rl.formulas.losses import LOSSES
from tfgrpo.rl.formulas.rewards import REWARDS

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "papers.md"
FAMILIES = {
    "loss": (LOSSES, "loss.name"),
    "advantage": (ADVANTAGES, "loss.advantage"),
    "credit": (CREDIT, "credit.name"),
    "reward": (REWARDS, "rewards.names"),
}


@dataclass(frozen=True, slots=True)
class Part:
    """One place where a system is."""

    where: str
    """`FAMILY:ENTRY` of a registry, or a path."""
    reach: str = ""
    """How it is switched on; a registry entry says it itself."""
    sure: str = ""
    """`code`, `paper`, `approximation` or `own`; a registry entry says it itself."""


def at(where: str, reach: str, sure: str) -> Part:
    """Return a part outside the registries."""
    return Part(where, reach, sure)


APPROX = "approximation"
BUILT: Mapping[str, tuple[str, tuple[Part, ...]]] = {
    "Training-Free GRPO": ("lessons from groups in place of gradients", (
        at("tfgrpo/experience/critic/paper_flow.py", '`learn.preset = "paper-main"`', "code"),
        at("tfgrpo/experience/reflect/reflector.py", "`learn.preset = \"default\"`", "own"))),
    "V_0": ("success of any model on a prompt from its outcomes on others", (
        at("routing/estimator/value_model.py", "`tfgrpo route`", "own"),
        at("tfgrpo/cli/train.py", '`curriculum.allocate = "v0"`', "own"))),
    "ToolChain*": ("A* over tool plans", (
        at("search/scorers/toolchain.py", '`search.scorer = "paper"` or `"robust"`', APPROX),)),
    "ADHint": ("hint length by difficulty, relative advantages", (
        at("tfgrpo/hints/adhint.py", '`hints.name = "adhint"`', APPROX),)),
    "POPE": ("prefixes of a solution as a guide, on-policy", (
        at("tfgrpo/hints/pope.py", '`hints.name = "pope"`', APPROX),)),
    "SAGE (self-hinting)": ("hint levels that follow each task's success", (
        at("tfgrpo/hints/sage.py", '`hints.name = "sage"` or `"sage_light"`', "code"),
        at("tfgrpo/nudges/hints.py", '`nudge.kind = "hints"`', "own"))),
    "Scaf-GRPO": ("a scaffolded success in place of one failure", (
        at("tfgrpo/hints/scaf.py", '`hints.name = "scaf"`', "code"),)),
    "QuestA": ("part of the solution in the prompt, less over time", (
        at("tfgrpo/hints/questa.py", '`hints.name = "questa"`', "code"),)),
    "StepHint": ("a ladder of solution steps under one baseline", (
        at("tfgrpo/hints/stephint.py", '`hints.name = "stephint"`', APPROX),)),
    "BREAD": ("branches from the shortest prefix that works", (
        at("tfgrpo/hints/bread.py", '`hints.name = "bread"`', APPROX),)),
    "DARS": ("more rollouts for hard tasks", (
        at("routing/budgets/published.py", '`curriculum.allocate = "dars"`', APPROX),)),
    "GDRO": ("rollouts by distributionally robust weights", (
        at("routing/budgets/published.py", '`curriculum.allocate = "gdro"`', APPROX),)),
    "sGPO": ("group size by difficulty after profiling", (
        at("routing/budgets/published.py", '`curriculum.allocate = "sgpo"`', APPROX),)),
    "VADE": ("tasks by Thompson sampling of their variance", (
        at("routing/budgets/published.py", '`curriculum.allocate = "vade"`', APPROX),)),
    "XRPO": ("rollouts by uncertainty; novelty of right answers", (
        at("routing/budgets/published.py", '`curriculum.allocate = "xrpo"`', APPROX),
        Part("advantage:xrpo"))),
    "Dr. Zero (HRPO)": ("one baseline for each number of hops", (Part("advantage:hop_baseline"),)),
    "ICPO": ("examples in context as an off-policy guide", (
        at("rl/distillation/icpo.py", "`tfgrpo escalate --method icpo`", APPROX),
        at("tfgrpo/nudges/examples.py", '`nudge.kind = "examples"`', APPROX))),
    "iGRPO": ("improve on the own best draft", (
        at("tfgrpo/nudges/drafts.py", '`nudge.kind = "drafts"`', APPROX),)),
    "NudgeRL": ("strategies widen what is tried", (
        at("tfgrpo/nudges/strategies.py", '`nudge.kind = "strategies"`', APPROX),
        at("rl/distillation/nudgerl.py", "`tfgrpo escalate --method nudge`", APPROX),
        Part("advantage:nudge"))),
    "LoPE": ("meaningless text before the prompt, when all fail", (
        at("tfgrpo/nudges/perturbation.py", '`nudge.kind = "perturb"`', APPROX),)),
    "A-GRAE": ("asymmetric advantages", (Part("advantage:a_grae"),)),
    "ArenaRL": ("ranks from a tournament of answers", (
        at("tfgrpo/verifiers/arena.py", '`verifier.kind = "arena"`', APPROX),
        Part("advantage:arena_rank"))),
    "ASPO (tool-integrated)": ("earlier tool calls", (Part("advantage:aspo"),)),
    "BNPO": ("advantages normalised by a Beta fit", (Part("advantage:bnpo"),)),
    "CANON": ("comparison within a condition", (Part("advantage:canon"),)),
    "Confucius3-Math": ("entropy bonus below a target", (
        at("rl/config.py", "`loss.entropy_target`", APPROX),)),
    "DaGRPO": ("weights by how distinct answers are", (Part("advantage:dagrpo"),)),
    "HICRA": ("more credit on planning tokens", (Part("credit:hicra"),)),
    "MathForge (DGPO)": ("difficulty-balanced advantages", (Part("advantage:dgpo"),)),
    "MC-GRPO": ("median as the centre", (Part("advantage:mc_grpo"),)),
    "NGRPO": ("a gradient from groups that failed", (Part("advantage:ngrpo"),)),
    "RiskPO": ("quantiles of the reward", (Part("advantage:riskpo"),)),
    "SEED-GRPO": ("scaled by semantic entropy", (
        Part("advantage:seed_linear"), Part("advantage:seed_exponential"),
        Part("advantage:seed_focal"))),
    "SPO-chain and SPO-tree": ("advantages of segments", (
        Part("credit:spo_chain"), Part("credit:spo_tree"))),
    "Temporal scheduling": ("which tokens count, over time", (Part("credit:temporal"),)),
    "Unlikeliness reward": ("rare right answers count more", (
        Part("reward:unlikeliness"), Part("advantage:unlikeliness_grpo"))),
    "BPO and GBPO": ("regression to a bounded ratio", (
        Part("loss:gbpo"), Part("advantage:median_centred"))),
    "DCPO (distribution-centric)": ("entropy of right answers", (
        Part("credit:dcpo_distribution"),)),
    "DHPO": ("token and sequence ratio mixed", (Part("loss:dhpo"),)),
    "DISPO": ("four clip bounds", (Part("loss:dispo"),)),
    "ETR": ("elastic trust region", (Part("loss:etr"),)),
    "GTPO (trajectory)": ("conflict tokens left out", (Part("credit:gtpo_trajectory"),)),
    "LLDS": ("no fall of likely right answers", (Part("loss:llds"),)),
    "LUSPO": ("sequence loss without length bias", (Part("loss:luspo"),)),
    "DRPO (decoupled reward)": ("lengths compared among right answers only", (
        Part("loss:drpo"),)),
    "Reg-GRPO (DeepVideo-R1)": ("regression to the advantage that log-ratios imply", (
        Part("loss:reg_grpo"),)),
    "GRAO": ("imitates the reference, explores, compares both", (Part("loss:grao"),)),
    "Nash-MP": ("win rate against the policy half a step ahead", (Part("loss:nash_mp"),)),
    "POWER-DL": ("labels of pairs move to where they have no slope", (Part("loss:power_dl"),)),
    "INPO": ("pairs pull towards the game's Nash policy", (Part("loss:inpo"),)),
    "RPO (regularised preference)": ("DPO and the likelihood of the better row", (
        Part("loss:rpo"),)),
    "P3O": ("pairwise policy gradient", (Part("loss:p3o"),)),
    "R2VPO": ("variance of the ratio as a penalty", (Part("loss:r2vpo"),)),
    "ROVER": ("values of a random policy", (Part("loss:rover"),)),
    "SPPO (self-play)": ("regression to win rates", (
        Part("loss:sppo_square"), Part("advantage:win_rate"),
        at("tfgrpo/verifiers/arena.py",
           '`verifier.kind = "win_rate"` with `loss.advantage = "dr_grpo"`', "own"))),
    "MinPRO": ("smallest prefix ratio", (Part("loss:minpro"),)),
    "REC family": ("off-policy REINFORCE: OPMD, AsymRE, rings", (
        Part("loss:opmd"), Part("loss:asymre"), Part("loss:rec_one_side"),
        Part("loss:rec_two_side"), Part("loss:rec_ring"), Part("loss:rec_k2"),
        Part("advantage:opmd_soft"), Part("advantage:asymre_baseline"))),
    "VCPO": ("step size by effective sample size", (Part("advantage:vcpo"),)),
    "ARPO (agentic)": ("branch where the model is unsure", (
        at("search/algorithms/tree_rollouts.py", '`search.algorithm = "entropy_rollouts"`',
           APPROX),)),
    "LATR": ("look ahead, keep branches that differ", (
        at("search/algorithms/tree_rollouts.py", '`search.algorithm = "lookahead_rollouts"`',
           APPROX),)),
    "D3S": ("subset of rollouts and tokens with most signal", (
        Part("advantage:d3s"), Part("credit:largest_signal"))),
    "R3L": ("reflect, then retry from the turning point", (Part("advantage:r3l"),)),
    "ARES": ("entropy as a reward of its own", (Part("reward:ares"),)),
    "Datarus-R1": ("from structure to content", (Part("reward:structure_to_content"),)),
    "DOT": ("outliers of length", (Part("reward:length_outlier"),)),
    "DVAO": ("several rewards by their variance", (Part("advantage:dvao"),)),
    "FAPO": ("flawed right answers count less", (Part("reward:fapo"),)),
    "G-RA": ("step rewards behind a gate", (Part("reward:gated_steps"),)),
    "GDPO": ("normalise each reward, then sum", (Part("advantage:gdpo"),)),
    "HBPO": ("budgets of length", (Part("reward:length_budget"),)),
    "Multi-objective GRPO (safety)": ("a weighted sum", (Part("reward:weighted_sum"),)),
    "OTC-PO": ("fewest tool calls", (Part("reward:otc"),)),
    "PEAR": ("entropy by phase", (Part("reward:pear"),)),
    "PRS": ("rewards in stages", (Part("reward:staged"),)),
    "A2TGPO": ("information gain by turn", (Part("credit:a2tgpo"),)),
    "GiGPO": ("steps that start alike form groups", (
        Part("credit:gigpo"), Part("reward:invalid_actions"))),
    "HGPO": ("the same over several lengths of history", (Part("credit:hgpo"),)),
    "IGPO": ("gain of belief in the answer", (Part("credit:igpo"),)),
    "IterResearch (EAPO)": ("discount for efficient ends", (Part("credit:eapo"),)),
    "MAPO (mixed advantage)": ("turn and rollout advantages mixed", (Part("credit:mapo"),)),
    "PORTool": ("rewards of a tree of tool calls", (
        Part("credit:portool"), at("search/groups.py", "`tfgrpo search` with `output.groups`",
                                   APPROX))),
    "SALT": ("shared steps count for neither side", (Part("credit:salt"),)),
}  # fmt: skip
"""System to what it adds and where it is."""

LEFT_OUT: Mapping[str, tuple[str, ...]] = {
    "not built so far": (
        "SWE-Reasoner", "MedS3", "POISE", "ADORA", "ERPO", "Function-call RL (entropy)", "G2RL",
        "ProGRPO", "Rank-GRPO", "VPO (vector)", "CAPO (curvature-aware)", "HAPO",
        "PIPO (policy improvement RL)", "PreRL / DSRL", "NPO / AutoNPO", "ReMix",
        "Missing old logits / PPO-EWMA", "ECHO", "R3 (replay-reflect-rank)", "RoRecomp", "SCOPE",
        "T-PPO", "Dynamic reward weighting", "DR-IRL / GRPO-S",
        "Information-consistent GRPO", "VSPO", "HiPER", "InfoPO", "SeeUPO", "TAPO", "THOR",
        "CRAFT (multi-hop QA)", "Agent-BRACE", "ArCHer",
    ),
    "a scheduler of generation; ours batches continuously and reads a shared prompt once": (
        "APRIL", "ARRoL", "Prefix Grouper",
    ),
    "several trained agents, or a game": (
        "Advantage Alignment (LLM)", "AOI", "FlexMARL", "LSPO (Werewolf)", "M-GRPO",
        "MasHost (HRPO)",
    ),
    "an environment or benchmark of its own": (
        "ReEx-SQL", "EvoEnv", "Healthcare AI GYM", "HeroBench", "JourneyBench", "LUMINA",
        "ShIOEnv",
    ),
    "a survey, without an algorithm": ("o1 roadmap", "GFCR"),
}  # fmt: skip

HEAD = """\
# Published systems, and where they are

Which published method is here, where, how sure we are of it, and how it is switched on. *code*: the
rule was read in released code. *paper*: it stands in the paper's text. *approximation*: our reading
of an abstract or a summary, never a reproduction. *own*: after the idea, by rules of our own. The
formulas of training have [a table of their own](rl_registry.md) with their tests.
"""


def sure_of(part: Part) -> str:
    """Return how sure a part is: the registry's word where it has one."""
    family, _, entry = part.where.partition(":")
    if family not in FAMILIES:
        return part.sure
    return str(FAMILIES[family][0][entry].certainty).partition(",")[0]


def reach_of(part: Part) -> str:
    """Return how a part is switched on."""
    family, _, entry = part.where.partition(":")
    if family not in FAMILIES:
        return part.reach
    key = FAMILIES[family][1]
    return f'`{key} = ["{entry}"]`' if family == "reward" else f'`{key} = "{entry}"`'


def file_of(part: Part) -> str:
    """Return the path of a part's code."""
    family, _, entry = part.where.partition(":")
    if family not in FAMILIES:
        return part.where
    code = FAMILIES[family][0][entry].fn
    return code.__module__.removeprefix("tfgrpo.").replace(".", "/") + ".py"


def page() -> str:
    """Return the index as Markdown."""
    lines = [HEAD, f"## Built: {len(BUILT)}", ""]
    lines += [
        "| system | what it adds | where | how sure | switched on by |",
        "|---|---|---|---|---|",
    ]
    for name, (idea, parts) in BUILT.items():
        files = ", ".join(dict.fromkeys(f"`{file_of(p)}`" for p in parts))
        sure = ", ".join(dict.fromkeys(sure_of(p) for p in parts))
        reach = "<br>".join(reach_of(p) for p in parts)
        shown = name.replace("*", "\\*")
        lines.append(f"| {shown} | {idea} | {files} | {sure} | {reach} |")
    count = sum(len(names) for names in LEFT_OUT.values())
    lines += ["", f"## Not built: {count}", "", "| why | systems |", "|---|---|"]
    lines += [f"| {why} | {', '.join(names)} |" for why, names in LEFT_OUT.items()]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.relative_to(ROOT))
