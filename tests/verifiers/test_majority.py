"""The majority of a group as its label."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.rl.tiny import tiny_config, tiny_parts, tiny_tasks
from tests.verifiers.rows import said, task
from tfgrpo import Config, FunctionPolicy, sample_group
from tfgrpo.errors import ConfigError
from tfgrpo.learning.learn import dry_run
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import GroupVerifier
from tfgrpo.rl.judge_calls import JudgeCalls
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rollout import Rollout, Task
from tfgrpo.sampling import judge
from tfgrpo.verifiers import Arena, Majority, Weighted, make_verifier
from tfgrpo.verifiers.factory import GROUP_KINDS


def answers(*texts: str) -> list[Rollout]:
    return [replace(said(text), rollout_id=f"r{i}", sample_index=i) for i, text in enumerate(texts)]


@pytest.mark.parametrize(
    ("texts", "options", "expected"),
    [
        (("so 12", "12.0", "it is 7", r"\boxed{12}"), {}, [1, 1, 0, 1]),
        (("1", "2", "1", "2"), {}, [0, 0, 0, 0]),
        (("", "", "3"), {}, [0, 0, 1]),
        (("1", "1", "2"), {"least": 0.7}, [0, 0, 0]),
        (("1", "1", "2"), {"least": 0.6}, [1, 1, 0]),
        (("a: x b: 1", "a: y b: 1", "a: y b: 2"), {"extract": r"a: (\w)"}, [0, 1, 1]),
    ],
)
async def test_the_most_frequent_answer_is_right(
    texts: tuple[str, ...], options: dict[str, Any], expected: list[float]
) -> None:
    majority = Majority(**options)
    assert isinstance(majority, GroupVerifier)
    scores = await majority.score_group(answers(*texts), task(None))
    assert [s.reward for s in scores] == expected


async def test_shares_are_parts_and_settings_are_checked() -> None:
    scores = await Majority().score_group(answers("1", "1", "2"), task(None))
    assert [s.parts["share"] for s in scores] == [2 / 3, 2 / 3, 1 / 3]
    assert (await Majority().score(said("4"), task(None))).reward == 1.0
    assert Majority(least=0.5).verifier_id != Majority().verifier_id
    for wrong in ({"least": 2.0}, {"extract": "("}):
        with pytest.raises(ConfigError):
            make_verifier({"kind": "majority", **wrong})


def test_a_run_trains_on_its_own_majority(tmp_path: Path) -> None:
    config = tiny_config(
        tmp_path,
        verifier={"kind": "majority", "extract": "^(.)"},
        rollout={"group_size": 16, "max_rows": 16},
    )
    trainer = Trainer(config, tiny_parts(), tiny_tasks(), make_verifier(config.verifier))
    groups = trainer.step().groups
    for group in groups:
        firsts = [r.answer[:1].casefold() for r in group.rollouts]
        right = {f for f, r in zip(firsts, group.rollouts, strict=True) if r.reward}
        assert len(right) <= 1
        assert all(firsts.count(f) == max(map(firsts.count, firsts)) for f in right)
    assert any(g.is_informative() for g in groups)


async def test_where_each_reply_is_judged_alone_a_verifier_of_groups_is_refused() -> None:
    policy = FunctionPolicy(lambda prompt, context: prompt, policy_id="same")
    with pytest.raises(ConfigError, match="sampling judges each reply alone"):
        await sample_group(task(None), policy, Majority())
    with pytest.raises(ConfigError, match="each reply alone"):
        await judge(said("4"), task(None), Majority())
    with pytest.raises(ConfigError, match=r"Weighted \(part 'most'\)"):
        Weighted({"most": (Majority(), 1.0)})
    with pytest.raises(ConfigError, match="base of an arena"):
        Arena(Majority(), ScriptedLM("A"), "Which is better?")


@pytest.mark.parametrize("kind", GROUP_KINDS)
def test_learning_from_single_replies_refuses_kinds_of_groups_before_it_asks(kind: str) -> None:
    asking = {"rubric": "Which is better?"} if kind != "majority" else {}
    base = {"base": {"kind": "exact"}} if kind == "arena" else {}
    config = Config.from_mapping({
        "policy": {"lm": "scripted:echo"}, "verifier": {"kind": kind, **asking, **base},
        "learn": {"entries": "exemplars"},
    })  # fmt: skip
    tasks = [Task(f"t{i}", f"say {i}", str(i)) for i in range(60)]
    with pytest.raises(ConfigError, match="learning judges each reply alone"):
        dry_run(config, tasks=tasks)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"curriculum": {"refill": 2}}, "curriculum.refill"),
        ({"rollout": {"group_size": 4, "strategy": "spo_chain"}}, "spo_chain"),
    ],
)
def test_training_that_mixes_rewards_of_several_groups_refuses_it(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    config = tiny_config(tmp_path, verifier={"kind": "majority"}, **changes)
    with pytest.raises(ConfigError, match=f"{said}.*against each other"):
        Trainer(config, tiny_parts(), tiny_tasks(), Majority())


def test_training_names_the_model_that_a_comparing_verifier_lacks(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, verifier={"kind": "win_rate", "rubric": "Which is better?"})
    with JudgeCalls(config) as judge, pytest.raises(ConfigError, match="names none: give it one"):
        make_verifier(config.verifier, open_lm=judge.open)
