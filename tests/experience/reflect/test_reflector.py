"""The flow over panels with a scripted critic: rules, marks, replays, rewrites, books."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from tests.experience.cases import group
from tfgrpo.errors import ConfigError
from tfgrpo.experience import ExperienceSettings, Library, LibraryProposal, Reflector, preset
from tfgrpo.experience.settings import ReflectSettings
from tfgrpo.lm.scripted import ScriptedLM
from tfgrpo.protocols import Request
from tfgrpo.rollout import RolloutGroup, Task

PLAIN = replace(preset("default"), exemplars=0, exemplar_reward=1.0)
Say = Callable[[str], dict[str, Any]]


def ticket(number: int, device: str, queue: str, reward: float = 0.0) -> RolloutGroup:
    return group(
        number, [reward, reward], f"ticket {number} about the {device}", reference=queue,
        answers=["guess", "guess"],
    )  # fmt: skip


TICKETS = [ticket(i, d, q) for i, (d, q) in enumerate(
    [("scanner", "NET"), ("scanner", "NET"), ("laptop", "HW"), ("laptop", "HW"), ("lamp", "ACC")]
)]  # fmt: skip


def row(text: str, *support: str, **more: Any) -> dict[str, Any]:
    return {"id": None, "topic": "queue", "text": text, "support": list(support), **more}


async def reflect(
    say: Say,
    groups: Sequence[RolloutGroup] = TICKETS,
    library: Library | None = None,
    settings: ExperienceSettings = PLAIN,
    **parts: Any,
) -> tuple[LibraryProposal, list[str]]:
    prompts: list[str] = []

    def reply(request: Request, seed: int | None) -> str:
        prompts.append(request.messages[0].content)
        return json.dumps(say(prompts[-1]))

    critic = Reflector(ScriptedLM(reply), settings, **parts)
    return await critic.propose(groups, library or Library(), step=1), prompts


async def test_rules_become_entries_with_their_tasks_and_state() -> None:
    def say(prompt: str) -> dict[str, Any]:
        return {"rules": [row("Scanners go to NET.", "t0", "t1", "t2"),
                          row("Lamps go to ACC, other devices not.", "t4")]}  # fmt: skip

    proposal, prompts = await reflect(say)
    first, second = proposal.library.shown
    assert first.claim.support == ("t0", "t1"), "the key of t2 says HW"
    assert (first.claim.state, second.claim.state) == ("confirmed", "provisional")
    assert first.provenance.task_ids == ("t0", "t1") and len(prompts) == 1
    text = "\n".join(p.text for p in proposal.library.context().parts)
    assert text.endswith("(seen in one task only)") and "NET." in text
    counts = proposal.counts
    assert counts.proposed == counts.applied + counts.merged + counts.rejected == 2


async def test_a_later_panel_is_shown_the_rules_before_and_completes_them_by_id() -> None:
    def say(prompt: str) -> dict[str, Any]:
        if "[E1]" not in prompt:
            shown = [t for t in ("t0", "t1") if f"### Task {t}\n" in prompt]
            return {"rules": [row("queue by device: scanner → NET", *(shown or ["t0"]))]}
        return {
            "rules": [row("queue by device: scanner → NET; laptop → HW", "t2", "t3", id="E1")],
            "entries": [{"id": "E1", "verdict": "confirmed", "tasks": ["t0", "t1"]}],
        }

    settings = replace(PLAIN, reflect=ReflectSettings(panel_groups=3, counter_evidence=0))
    proposal, prompts = await reflect(say, settings=settings)
    (entry,) = proposal.library.shown
    assert entry.text == "queue by device: scanner → NET; laptop → HW"
    assert set(entry.claim.support) == {"t0", "t1", "t2", "t3"} and len(prompts) == 2
    assert proposal.counts.merged == 1, "the second panel's rule was taken into the first's"


async def test_an_update_may_not_lose_a_value_of_a_confirmed_entry_unless_refuted() -> None:
    first, _ = await reflect(lambda _: {"rules": [
        row("queue by device: scanner → NET; laptop → HW", "t0", "t1", "t2")]})  # fmt: skip

    def lose(**more: Any) -> Say:
        return lambda p: {} if "That was all" in p else {
            "rules": [row("queue by device: scanner → NET", "t0", "t1", id="E1", **more)],
        } if "That was all" not in p else {"rules": []}  # fmt: skip

    kept, _ = await reflect(lose(), library=first.library)
    assert "laptop → HW" in kept.library.get("E1").text
    assert any("loses" in o.reason for o in kept.outcomes)
    changed, _ = await reflect(lose(against=["t2"]), library=first.library)
    assert changed.library.get("E1").text == "queue by device: scanner → NET"


async def test_an_entry_that_keys_refute_is_no_longer_shown() -> None:
    first, _ = await reflect(lambda _: {"rules": [row("Lamps go to ACC at once.", "t4")]})
    verdicts = [{"id": "E1", "verdict": "refuted", "tasks": ["t0", "t1"]}]
    second, _ = await reflect(lambda _: {"rules": [], "entries": verdicts}, library=first.library)
    assert second.has_change and not second.library.shown
    assert second.library.get("E1").claim.state == "refuted"


class Replays:
    """Rolls again with a reward by round; remembers what was asked."""

    def __init__(self, *rewards: float) -> None:
        self.rewards = rewards
        self.asked: list[list[str]] = []

    async def __call__(
        self, library: Library, tasks: Sequence[Task], draw: str
    ) -> list[RolloutGroup]:
        reward = self.rewards[len(self.asked)]
        self.asked.append([t.task_id for t in tasks])
        return [group(t.task_id[1:], [reward], t.text, reference=t.reference) for t in tasks]


async def test_a_rule_that_turns_its_tasks_stays_and_has_an_early_value() -> None:
    replays = Replays(1.0)
    proposal, prompts = await reflect(
        lambda _: {"rules": [row("Scanners go to NET.", "t0", "t1")]}, replay=replays
    )
    assert replays.asked == [["t0", "t1"]] and len(prompts) == 1
    (entry,) = proposal.library.shown
    assert entry.replayed is not None and entry.replayed.estimate == 1.0
    assert entry.value is None, "an early sign is no measured value"


@pytest.mark.parametrize("stands", [True, False])
async def test_a_rule_that_turns_nothing_goes_back_once_and_is_kept_or_withdrawn(
    stands: bool,
) -> None:
    def say(prompt: str) -> dict[str, Any]:
        if "That was all" in prompt:
            assert "no better than before" in prompt and "Right answer" in prompt
            better = row("Scanners go to queue NET: write NET alone.", "t0", "t1", id="E1")
            return {"rules": [better] if stands else []}
        return {"rules": [row("Scanners go to NET.", "t0", "t1")]}

    replays = Replays(0.0, 0.0)
    proposal, prompts = await reflect(say, replay=replays)
    assert len(prompts) == 2 and replays.asked == [["t0", "t1"], ["t0", "t1"]]
    texts = [e.text for e in proposal.library.shown]
    assert texts == (["Scanners go to queue NET: write NET alone."] if stands else [])
    counts = proposal.counts
    assert counts.proposed == counts.applied + counts.merged + counts.rejected


async def test_a_memory_goes_back_with_the_reason_and_its_words_are_not_kept() -> None:
    def say(prompt: str) -> dict[str, Any]:
        if "That was all" in prompt:
            assert "[R1]" in prompt and "refused: quotes the complete answer" in prompt
            return {"rules": [row("Lamps have a queue of their own.", "t4", id="R1")]}
        return {"rules": [row("Just answer ACC.", "t4")]}

    proposal, _ = await reflect(say)
    assert [e.text for e in proposal.library.shown] == ["Lamps have a queue of their own."]
    refused = [o for o in proposal.outcomes if o.result == "rejected"]
    assert len(refused) == 1 and "ACC" not in refused[0].edit.text


async def test_a_crowded_topic_is_rewritten_as_a_rival_of_the_increment() -> None:
    def say(prompt: str) -> dict[str, Any]:
        if "have become many" in prompt:
            return {"rules": [{"topic": "queue", "text": "scanner NET, laptop HW, lamp ACC",
                               "replaces": ["E1", "E2", "E3"]}]}  # fmt: skip
        return {"rules": [row("Scanners go to NET.", "t0", "t1"), row("For laptops take HW.", "t2"),
                          row("A lamp is for ACC, as seen.", "t4")]}  # fmt: skip

    settings = replace(PLAIN, reflect=ReflectSettings(crowded=3))
    proposal, _ = await reflect(say, settings=settings)
    assert len(proposal.library.shown) == 3 and proposal.rewrite is not None
    assert [e.text for e in proposal.rewrite.shown] == ["scanner NET, laptop HW, lamp ACC"]


async def test_groups_at_full_marks_and_groups_that_show_nothing_cost_no_call() -> None:
    solved = [ticket(1, "lamp", "ACC", 1.0), group(2, [0.3, 0.3])]
    proposal, prompts = await reflect(lambda _: {"rules": []}, solved)
    assert prompts == [] and proposal.informative == 0
    equal = [ticket(3, "lamp", "ACC", 0.3)]
    proposal, prompts = await reflect(lambda _: {"rules": []}, equal)
    assert len(prompts) == 1 and (proposal.informative, proposal.differing) == (1, 0)


async def test_fixed_text_comes_first_and_is_equal_in_every_prompt() -> None:
    settings = replace(PLAIN, agent="You sort tickets.", reflect=ReflectSettings(panel_groups=2))
    _, prompts = await reflect(lambda _: {"rules": []}, settings=settings)
    assert len(prompts) == 3
    heads = {p.split("The entries that the agent has now")[0] for p in prompts}
    assert len(heads) == 1 and "You sort tickets." in heads.pop()


def test_other_flows_are_made_elsewhere() -> None:
    with pytest.raises(ConfigError, match="contrast"):
        Reflector(ScriptedLM(lambda *_: "[]"), preset("contrast"))


async def test_an_entry_on_trial_goes_with_the_next_change_of_a_later_pass() -> None:
    said = {"rules": [row("A lamp is for ACC, as seen.", "t4")]}
    critic = Reflector(ScriptedLM(lambda *_: json.dumps(said)), PLAIN)
    first = (await critic.propose(TICKETS, Library(), step=1)).library
    later = [replace(g, metadata={"epoch": 1}) for g in TICKETS]
    said["rules"] = []
    quiet = await critic.propose(later, first, step=2)
    assert not quiet.has_change, "no look is spent on a deletion alone"
    said["rules"] = [row("Scanners go to NET.", "t0", "t1")]
    second = (await critic.propose(later, first, step=3)).library
    assert [e.text for e in second.shown] == ["Scanners go to NET."]
    said["rules"] = [row("Lamps: ACC, whatever else.", "t4", id="E1"), *said["rules"]]
    kept = (await critic.propose(later, first, step=4)).library
    assert len(kept.shown) == 2, "what is said again in this pass stays"


async def test_a_window_too_small_for_a_panel_costs_no_call_and_is_told() -> None:
    settings = preset("default", exemplars=0, budget={"context_tokens": 2000, "reply_tokens": 160})
    proposal, prompts = await reflect(lambda _: {"rules": []}, settings=settings)
    assert prompts == [] and proposal.calls["not_asked"] == 5
    assert "window of 2000 tokens" in proposal.notes[0].problem
