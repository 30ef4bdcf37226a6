"""The house-rules benchmark: what its simulators know, and that it measures learning."""

from __future__ import annotations

import ast
import asyncio
import json
import statistics
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.benchmarks.learning.house_rules import critic_simulator, policy_simulator
from tests.benchmarks.learning.house_rules.__main__ import Cell, Sizes, costs, interval, row_of
from tests.benchmarks.learning.house_rules.families import FAMILIES, Case, Family
from tests.benchmarks.learning.house_rules.families.family import shuffled_keys, wrong_keys
from tests.benchmarks.learning.house_rules.server import Bench, Seat
from tfgrpo.runtime.syntax import syntax_tree

HOME = Path(policy_simulator.__file__).parent
ROOT = "tests.benchmarks.learning.house_rules"
REFLECTION = """I provided an assistant with the following instructions:
```
{instruction}
```

Examples of inputs with the assistant's response and feedback:
```
{examples}
```

Write a new instruction for the assistant. Provide the new instructions within ``` blocks."""


def answer(system: str, text: str, seed: int = 0, noise: float = 0.0) -> str:
    return policy_simulator.reply([("system", system), ("user", text)], seed, noise)


def mean_reward(family: Family, system: str, cases: tuple[Case, ...], noise: float = 0.0) -> float:
    rewards = [
        family.grade(answer(system, c.text, seed, noise), c, tell=False)[0]
        for c in cases
        for seed in range(3)
    ]
    return statistics.fmean(rewards)


def reflected(family: Family, cases: tuple[Case, ...], tell: bool = True) -> str:
    """The instruction that the critic writes after one look at all cases."""
    examples = []
    for i, case in enumerate(cases, 1):
        reply = answer(family.system, case.text, i)
        feedback = family.grade(reply, case, tell=tell)[1]
        examples.append(
            f"# Example {i}\n## Inputs\n{case.text}\n\n## Generated Outputs\n{reply}\n\n"
            f"## Feedback\n{feedback}"
        )
    prompt = REFLECTION.format(instruction=family.system, examples="\n\n".join(examples))
    return critic_simulator.reply([("user", prompt)]).strip("`\n")


def imported(path: Path) -> set[str]:
    """Names that a module imports, and every call that could import by another way."""
    found: set[str] = set()
    for node in ast.walk(syntax_tree(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found |= {a.name for a in node.names}
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0
            found |= {node.module or ""} | {f"{node.module}.{a.name}" for a in node.names}
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"open", "exec", "eval", "__import__", "compile", "globals"}
    return found


@pytest.mark.parametrize("simulator", ["policy_simulator", "critic_simulator"])
def test_a_simulator_cannot_reach_the_hidden_rules(simulator: str) -> None:
    seen: set[str] = set()
    todo = [simulator]
    while todo:
        name = todo.pop()
        if name in seen:
            continue
        seen.add(name)
        for module in imported(HOME / f"{name.replace('.', '/')}.py"):
            if module.startswith(ROOT + "."):
                inner = module.removeprefix(ROOT + ".")
                if (HOME / f"{inner.replace('.', '/')}.py").exists():
                    todo.append(inner)
                continue
            top = module.split(".")[0]
            assert top not in {
                "tests",
                "tfgrpo",
                "importlib",
                "sys",
                "os",
                "pathlib",
                "inspect",
                "gc",
            }
    assert len(seen) > 4
    assert not any(name.startswith("families") for name in seen)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_family_has_five_hidden_rules_or_more_and_its_tasks_say_none(family: Family) -> None:
    assert len(family.rules) >= 5
    split = family.draw(0, 24, 12, 24)
    for case in (*split.practice, *split.test):
        assert family.grade(case.key, case, tell=True)[0] == 1.0
        assert not any(rule in case.text or rule in family.system for rule in family.rules)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_no_task_stands_in_two_splits(family: Family) -> None:
    split = family.draw(3, 40, 40, 40)
    texts = [c.text for c in (*split.practice, *split.gate, *split.test)]
    assert len(set(texts)) == 120


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_with_the_rules_told_in_prose_the_policy_is_right_and_without_them_it_guesses(
    family: Family,
) -> None:
    test = family.draw(1, 8, 8, 60).test
    told = [
        family.system + "\n\n" + "\n".join(f"- {r}" for r in family.rules),
        family.system + " " + " ".join(family.rules),
        family.system + "\n\n" + "\n".join(f"{i}. {r}" for i, r in enumerate(family.rules, 1)),
    ]
    for system in told:
        assert mean_reward(family, system, test) >= 0.98
    assert 0.2 <= mean_reward(family, family.system, test) <= 0.6


@pytest.mark.parametrize("noise", [0.1, 0.25])
def test_a_slip_is_a_guess_so_that_noise_costs_its_share(noise: float) -> None:
    family = FAMILIES["labels"]
    test = family.draw(2, 8, 8, 80).test
    told = family.system + " " + " ".join(family.rules)
    bare, best = (mean_reward(family, s, test) for s in (family.system, told))
    slipped = mean_reward(family, told, test, noise)
    # Later parts depend on earlier ones, so a slip may cost more than its own part.
    assert best - 2 * noise * (best - bare) - 0.03 < slipped < best - 0.5 * noise * (best - bare)


WORDINGS = Path(__file__).with_name("house_rules_wordings.txt").read_text(encoding="utf-8")
OTHER_WORDS = [
    tuple(block.split("\n", 1)) for block in WORDINGS.removeprefix("=== ").split("\n=== ")
]
"""The rules as other people would write them: a family's name, and bullets, tables or lessons."""


@pytest.mark.parametrize(("name", "words"), OTHER_WORDS)
@pytest.mark.parametrize("place", ["system", "before the task"])
def test_the_policy_reads_rules_in_any_usual_wording_and_place(
    name: str, words: str, place: str
) -> None:
    family = FAMILIES[name]
    rewards = []
    for case in family.draw(4, 8, 8, 40).test:
        system, user = family.system, case.text
        if place == "system":
            system += "\n\n" + words
        else:
            user = f"{words}\n\n{case.text}"
        reply = policy_simulator.reply([("system", system), ("user", user)], 0)
        rewards.append(family.grade(reply, case, tell=True))
    assert statistics.fmean(r for r, _ in rewards) >= 0.98, [f for r, f in rewards if r < 1][:3]


def test_a_lesson_without_a_value_changes_nothing() -> None:
    family = FAMILIES["labels"]
    vague = "\n- Choose a moderate priority and a few hours.\n- Think about the queue carefully."
    for case in family.draw(5, 8, 8, 20).test:
        prompt = policy_simulator.read_prompt(
            [("system", family.system + vague), ("user", case.text)]
        )
        assert prompt is not None
        assert not prompt.rules


def test_worked_examples_help_as_turns_and_as_text() -> None:
    family = FAMILIES["letters"]
    split = family.draw(6, 8, 8, 40)
    turns = [m for c in split.practice for m in (("user", c.text), ("assistant", c.key))]
    lines = [f"- {c.text} → {c.key.replace(chr(10), ' / ')}" for c in split.practice]
    text = family.system + "\n\nExamples:\n" + "\n".join(lines)
    bare = mean_reward(family, family.system, split.test)
    by_text = mean_reward(family, text, split.test)
    by_turns = statistics.fmean(
        family.grade(
            policy_simulator.reply([("system", family.system), *turns, ("user", c.text)], 0),
            c,
            tell=False,
        )[0]
        for c in split.test
    )
    assert by_text > bare + 0.1
    assert by_turns == pytest.approx(by_text, abs=0.1)


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_both_simulators_are_functions_of_their_request(family: Family) -> None:
    case = family.draw(7, 8, 8, 8).test[0]
    messages = [("system", family.system), ("user", case.text)]
    assert policy_simulator.reply(messages, 3, 0.1) == policy_simulator.reply(
        list(messages), 3, 0.1
    )
    assert len({policy_simulator.reply(messages, seed) for seed in range(20)}) > 1
    cases = family.draw(7, 12, 8, 8).practice
    critic_simulator._reply.cache_clear()
    first = reflected(family, cases)
    critic_simulator._reply.cache_clear()
    assert reflected(family, cases) == first


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_a_critic_that_sees_enough_cases_says_the_rules(family: Family) -> None:
    split = family.draw(8, 36, 8, 60)
    assert mean_reward(family, reflected(family, split.practice), split.test) >= 0.95


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_one_wrong_key_in_ten_costs_a_critic_little(family: Family) -> None:
    split = family.draw(9, 40, 8, 60)
    spoilt = wrong_keys(split.practice, 0.1, 0)
    assert sum(a.key != b.key for a, b in zip(spoilt, split.practice, strict=True)) == 4
    assert mean_reward(family, reflected(family, spoilt), split.test) >= 0.85


@pytest.mark.parametrize("family", FAMILIES.values(), ids=list(FAMILIES))
def test_from_shuffled_keys_a_critic_learns_nothing(family: Family) -> None:
    gains = []
    for seed in range(3):
        split = family.draw(20 + seed, 30, 8, 40)
        bare = mean_reward(family, family.system, split.test)
        learnt = reflected(family, shuffled_keys(split.practice, seed))
        gains.append((mean_reward(family, learnt, split.test) - bare) / (1 - bare))
    assert abs(statistics.fmean(gains)) < 0.15


def test_where_values_are_forbidden_the_critic_is_vague() -> None:
    family = FAMILIES["labels"]
    case = family.draw(10, 8, 8, 8).practice[0]
    prompt = (
        f"Compare the attempts.\nThe task:\n{case.text}\n"
        f"The right answer, for you alone:\n{case.key}\n"
        "Attempt 1: reward 0.33\nagent: HW/3/8\n"
        "verifier: queue: wrong; priority: wrong; hours: right.\n"
        "A lesson quotes no answer, no name, no number.\n"
        'Reply with JSON alone: {"lessons": [{"lesson": "<sentence>", "attempts": [<numbers>]}]}'
    )
    (lesson,) = json.loads(critic_simulator.reply([("user", prompt)]))["lessons"]
    said = lesson["lesson"]
    assert not any(value in said for value in case.parts.values())
    free = prompt.replace("A lesson quotes no answer, no name, no number.\n", "")
    spoken = json.loads(critic_simulator.reply([("user", free)]))["lessons"]
    assert any(case.parts["queue"] in s["lesson"] for s in spoken)


SMALL = Sizes(practice=24, gate=12, test=24)


async def rows_of(*cells: Cell) -> list[dict[str, Any]]:
    """Rows of cells, one seed each."""
    async with Bench().running() as bench:
        return [await row_of(cell, bench, 1, None) for cell in cells]


def test_the_default_preset_learns_a_house_and_nothing_from_shuffled_keys() -> None:
    cells = [
        Cell("letters", "default", "both", 0.0, keys, sizes=SMALL) for keys in ("true", "shuffled")
    ]
    true, shuffled = asyncio.run(rows_of(*cells))
    assert true["captured"] > 0.8
    assert abs(shuffled["captured"]) < 0.25
    assert true["rollouts"] >= 24
    assert true["tokens"] > 0
    assert true["prompt_tokens_per_call"] > 0


def test_what_the_verifier_says_teaches_as_well_as_keys_do() -> None:
    (row,) = asyncio.run(rows_of(Cell("labels", "default", "telling", 0.0, sizes=SMALL)))
    assert row["captured"] > 0.8


def test_captured_gain_has_students_interval_over_seeds() -> None:
    # Mean 0.5, standard deviation 0.1, 3 seeds: 4.30 * 0.1 / sqrt(3) = 0.2483.
    middle, low, high = interval([0.4, 0.5, 0.6])
    assert (middle, low, high) == pytest.approx((0.5, 0.2517, 0.7483), abs=1e-3)


def test_what_wrong_keys_cost_is_read_off_the_rows() -> None:
    base = {"family": "labels", "method": "m", "arm": "both", "noise": 0.0}
    rows = [
        {**base, "keys": "true", "captured": 0.95},
        {**base, "keys": "wrong", "captured": 0.9},
        {**base, "keys": "shuffled", "captured": 0.01},
    ]
    found = costs(rows)
    assert found["wrong_keys_cost"] == {"m/both/labels": 0.05}
    assert found["shuffled_gain"] == {"m/both/labels": 0.01}


def test_the_server_counts_what_each_learner_asks_for() -> None:
    family = FAMILIES["labels"]
    case = family.draw(0, 1, 1, 1).practice[0]
    body = {
        "model": "policy",
        "messages": [
            {"role": "system", "content": family.system},
            {"role": "user", "content": case.text},
        ],
    }

    def post(url: str, row: object) -> Any:
        headers = {"Content-Type": "application/json"}
        asked = urllib.request.Request(url, json.dumps(row).encode(), headers)
        with urllib.request.urlopen(asked, timeout=60) as reply:
            return json.load(reply)

    async def play() -> tuple[list[Any], Any, Seat]:
        async with Bench().running() as bench:
            seat = bench.seats["x"] = Seat(family, {case.task_id: case}, 0.0, True)
            url = bench.url("x")
            chat = f"{url}/v1/chat/completions"
            replies = [await asyncio.to_thread(post, chat, body) for _ in range(12)]
            row = {"task_id": case.task_id, "reply": case.key}
            return replies, await asyncio.to_thread(post, f"{url}/grade", row), seat

    replies, grade, seat = asyncio.run(play())
    answers = {r["choices"][0]["message"]["content"] for r in replies}
    assert len(answers) > 1, "draws without a seed must differ"
    assert grade["reward"] == 1.0
    assert seat.account.calls == {"policy": 12}
    sent = -(-len(family.system) // 4) + -(-len(case.text) // 4)
    assert seat.account.prompt_tokens == 12 * sent


def test_a_form_to_fill_in_is_told_from_answers_that_are_json() -> None:
    family = FAMILIES["tools"]
    case = family.draw(0, 1, 1, 1).practice[0]
    reply = answer(family.system, case.text)
    prompt = (
        'Return JSON:\n{"diagnosis": "<why>", "insights": [{"content": "<a lesson>", "tags": []}]}'
        f"\nQUERY:\n{case.text}\n\nGENERATOR ANSWER:\n{reply}\n\nFEEDBACK:\n"
        f"Ground truth: {case.key}\nExecution feedback: {family.grade(reply, case, tell=True)[1]}"
    )
    said = json.loads(critic_simulator.reply([("user", prompt)]))
    assert set(said) == {"diagnosis", "insights"}
    assert any(case.parts["action"] in row["content"] for row in said["insights"])
