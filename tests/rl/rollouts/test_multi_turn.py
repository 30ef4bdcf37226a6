"""Rollouts of several turns: one token sequence, all drawn together, tools and environments."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.cli.test_train import write_model
from tests.rl.test_trainer import comparable, fingerprint, metrics
from tests.rl.tiny import EvenTokens, tiny_config, tiny_parts, tiny_tasks
from tfgrpo.errors import ConfigError
from tfgrpo.messages import Message
from tfgrpo.policies.tools import tool
from tfgrpo.protocols import Generated, Sampling
from tfgrpo.rl.monitoring.metrics import group_figures
from tfgrpo.rl.rollouts.factory import CountingGenerator, maker_of, own_generator
from tfgrpo.rl.rollouts.multi_turn import Judging, MultiTurnMaker, TurnSetup
from tfgrpo.rl.rollouts.plugins import tools_of
from tfgrpo.rl.rollouts.prompter import Prompter
from tfgrpo.rl.rollouts.turn_tools import STOP, OffersTools, TurnText, TurnTools
from tfgrpo.rl.rollouts.turns import TurnLimits
from tfgrpo.rl.trainer import Trainer
from tfgrpo.rl.update.rollout_rows import row_of
from tfgrpo.rollout import Rollout, Score, Task

HERE = "tests.rl.rollouts.test_multi_turn"
END = "‡"


class ChatTokenizer:
    """One token a character and a template with turn ends; `END` is token 2."""

    chat_template = "yes"

    def apply_chat_template(
        self, turns: Any, *, add_generation_prompt: bool, tokenize: bool
    ) -> str:
        text = "".join(f"[{t['role']}]{t['content']}{END}\n" for t in turns)
        return text + "[assistant]" * add_generation_prompt

    def __call__(self, text: str, *, add_special_tokens: bool) -> dict[str, list[int]]:
        return {"input_ids": [2 if c == END else ord(c) for c in text]}

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return "".join(END if i == 2 else chr(i) for i in ids if i != 2 or not skip_special_tokens)


class Script:
    """A generator that says line after line of a script, by the turn that a prompt is at."""

    def __init__(self, *lines: str) -> None:
        self.lines = lines
        self.calls: list[int] = []

    def generate(
        self,
        token_ids: Sequence[Sequence[int]],
        n: int,
        sampling: Sampling,
        seeds: Sequence[Sequence[int]],
    ) -> list[list[Generated]]:
        assert n == 1 and all(len(s) == 1 for s in seeds)
        self.calls.append(len(token_ids))
        made = []
        for ids in token_ids:
            turn = ChatTokenizer().decode(ids).count("[assistant]") - 1
            said = [2 if c == END else ord(c) for c in self.lines[min(turn, len(self.lines) - 1)]]
            made.append([Generated(tuple(said), (-0.5,) * len(said), "stop")])
        return made

    def sync(self, named_params: Any) -> None:
        """Nothing to take."""


class Says:
    """Reward 1 where the last turn holds the reference."""

    verifier_id = "says"
    reward_range = (0.0, 1.0)

    def check_task(self, task: Task) -> None:
        """Every task will do."""

    async def score(self, rollout: Rollout, task: Task) -> Score:
        return Score(float(str(task.reference) in rollout.answer))


def add(a: int, b: int) -> int:
    """Add two numbers."""
    return a + b


async def slow(seconds: float) -> str:
    """Wait."""
    await asyncio.sleep(seconds)
    return "done"


def player(generator: Any, make_environment: Any = None, **limits: int) -> MultiTurnMaker:
    tokenizer = ChatTokenizer()
    tools = {t.spec.name: t for t in (tool(add), tool(slow))}
    return MultiTurnMaker(
        generator,
        Prompter(tokenizer, context_tokens=5000),
        Judging(Says()),
        Sampling(max_tokens=200),
        TurnSetup(
            make_environment or (lambda task: TurnTools(tools, timeout_s=0.2, max_chars=100)),
            TurnText(tokenizer, template="chat", eos_ids=(2,)),
            TurnLimits(**{"max_turns": 4, "max_tokens": 5000} | limits),
            act_timeout_s=5.0,
        ),
        policy_id="p",
    )


TASKS = [Task("one", "2 + 3?", reference=5), Task("two", "2 + 3?", reference=6)]
CALL = 'Action: add {"a": 2, "b": 3}' + END
ANSWER = "It is 5." + END


def test_a_rollout_is_the_templates_own_text_token_by_token() -> None:
    (group, _) = player(Script(CALL, ANSWER)).make(TASKS, 2, seed=1)
    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": CALL.removesuffix(END)},
        {"role": "user", "content": "Observation: 5"},
    ]
    tokenizer = ChatTokenizer()
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    wanted = tokenizer(text + ANSWER, add_special_tokens=False)["input_ids"]
    for rollout in group.rollouts:
        row = row_of(rollout, index=0)
        assert [*row.prompt_ids, *row.suffix_ids] == wanted
        sampled = [row.suffix_ids[i] for i in row.loss_positions or ()]
        assert tokenizer.decode(sampled) == CALL + ANSWER
        assert rollout.metadata == {"tool_calls": 1, "invalid_actions": 0}
        assert rollout.steps[0].observations == (Message("user", "Observation: 5"),)


def test_all_rollouts_are_drawn_together_and_judged() -> None:
    script = Script(CALL, ANSWER)
    made = player(script)
    groups = made.make(TASKS, 3, seed=1)
    assert script.calls == [6, 6]
    assert [g.rewards_G for g in groups] == [(1.0,) * 3, (0.0,) * 3]
    assert [r.sample_index for r in groups[0].rollouts] == [0, 1, 2]
    assert made.figures.rollouts == 6
    assert made.figures.completion_tokens == 6 * (len(CALL) + len(ANSWER))


def test_a_turn_without_an_end_gets_the_templates() -> None:
    """A stop string cut the turn before its end, so the template's own end is put in."""
    cut = 'Action: add {"a": 2, "b": 3}' + STOP
    (group, _) = player(Script(cut, ANSWER)).make(TASKS, 1, seed=1)
    (rollout,) = group.rollouts
    assert rollout.steps[0].action.content == cut.removesuffix(STOP)  # not what it made up
    row = row_of(rollout, index=0)
    text = ChatTokenizer().decode([*row.prompt_ids, *row.suffix_ids])
    assert f"[assistant]{cut}{END}\n[user]Observation: 5{END}\n[assistant]{ANSWER}" in text


def test_wrong_calls_are_told_and_counted() -> None:
    lines = [
        'Action: sub {"a": 2}' + END,
        'Action: add {"a": 2}' + END,
        'Action: slow {"seconds": 9}' + END,
        ANSWER,
    ]
    (group, _) = player(Script(*lines)).make(TASKS, 1, seed=1)
    (rollout,) = group.rollouts
    told = [s.observations[0].content for s in rollout.steps[:-1]]
    assert "no tool 'sub'" in told[0] and "add was not run" in told[1] and "0.2 s" in told[2]
    assert rollout.metadata == {"tool_calls": 1, "invalid_actions": 2}
    assert rollout.reward == 1.0


class ToolTokenizer(ChatTokenizer):
    """A template that knows tools, as Qwen's does: tool turns stand in user turns."""

    chat_template = "{% if tools %}"

    def apply_chat_template(self, turns: Any, tools: Any = (), **options: Any) -> str:
        head = "".join(f"<{t['function']['name']}>" for t in tools)
        shown = [
            {"role": "user", "content": f"<tool_response>{t['content']}</tool_response>"}
            if t["role"] == "tool"
            else t
            for t in turns
        ]
        return head + super().apply_chat_template(shown, **options)


def test_native_calls_go_through_the_models_own_template() -> None:
    tools = {t.spec.name: t for t in (tool(add), tool(slow))}
    tokenizer = OffersTools(ToolTokenizer(), tools)
    call = '<tool_call>{"name": "add", "arguments": {"a": 2, "b": %d}}</tool_call>'
    said = "I add." + call % 3 + call % 4 + END
    maker = player(Script(said, ANSWER))
    maker.prompter = Prompter(tokenizer, context_tokens=5000)
    maker._turns = TurnSetup(
        lambda task: TurnTools(tools, native=True, timeout_s=1.0, max_chars=100),
        TurnText(tokenizer, template="chat", eos_ids=(2,)),
        TurnLimits(4, 5000),
    )
    (group, _) = maker.make(TASKS, 1, seed=1)
    (rollout,) = group.rollouts
    row = row_of(rollout, index=0)
    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": said.removesuffix(END)},
        {"role": "tool", "content": "5"},
        {"role": "tool", "content": "6"},
    ]
    text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    assert text.startswith("<add><slow>")
    assert ChatTokenizer().decode([*row.prompt_ids, *row.suffix_ids]) == text + ANSWER
    assert rollout.metadata == {"tool_calls": 2, "invalid_actions": 0} and rollout.reward == 1.0
    with pytest.raises(ConfigError, match=r"knows no tools; set multi_turn\.calls = 'text'"):
        OffersTools(ChatTokenizer(), tools)


def test_a_rollout_that_goes_on_for_ever_is_cut() -> None:
    (group, _) = player(Script(CALL), max_turns=3).make(TASKS, 1, seed=1)
    (rollout,) = group.rollouts
    assert rollout.is_truncated and len(rollout.steps) == 3


class Brittle:
    """Fails on one task."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def act(self, action: Message) -> None:
        if self._task.task_id == "two":
            raise KeyError("board")


def test_an_environment_that_fails_ends_its_rollout_only() -> None:
    good, bad = player(Script(ANSWER), Brittle).make(TASKS, 2, seed=1)
    assert [r.outcome for r in good.rollouts] == ["graded"] * 2
    assert [r.outcome for r in bad.rollouts] == ["policy_failed"] * 2
    assert "board" in bad.rollouts[0].error


def test_an_error_of_the_generator_passes_through() -> None:
    class Broken(Script):
        def generate(self, *given: Any) -> Any:
            raise ConfigError("out of luck")

    with pytest.raises(ConfigError, match="out of luck"):
        player(Broken()).make(TASKS, 2, seed=1)


def test_a_prompt_that_is_too_long_stops_all_without_a_draw() -> None:
    script = Script(ANSWER)
    with pytest.raises(ConfigError, match="task 'long': its prompt has"):
        player(script).make([*TASKS, Task("long", "x" * 6000)], 2, seed=1)
    assert script.calls == []


def test_a_template_that_drops_assistant_turns_is_refused() -> None:
    class Drops(ChatTokenizer):
        def apply_chat_template(self, turns: Any, **options: Any) -> str:
            kept = [t for t in turns if t["role"] != "assistant"]
            return super().apply_chat_template(kept, **options)

    with pytest.raises(ConfigError, match="does not keep assistant turns"):
        TurnText(Drops(), template="chat", eos_ids=(2,))


def echo(text: str) -> str:
    """Say it again."""
    return text


class Parity:
    """Answers twice with the parity of what was said."""

    def __init__(self, task: Task) -> None:
        self._left = 2

    async def act(self, action: Message) -> list[Message] | None:
        self._left -= 1
        return None if self._left < 0 else [Message("user", f"p{len(action.content) % 2}")]


SECTIONS: dict[str, Any] = {
    "multi_turn": {"environment": f"{HERE}:Parity", "max_tokens": 90},
    "rollout": {"max_tokens": 6, "stop": list("ACEGIKMOQSUWYacegikmoqsuwy")},
    "optimiser": {"micro_batch_tokens": 400},
}


def make(folder: Path, **options: Any) -> Trainer:
    return Trainer(
        tiny_config(folder, **SECTIONS), tiny_parts(), tiny_tasks(), EvenTokens(), **options
    )


def test_a_resumed_run_of_several_turns_is_bit_equal(tmp_path: Path) -> None:
    whole = make(tmp_path / "whole")
    whole.train()
    cut = make(tmp_path / "cut")
    while cut.step_number < 2:
        cut._write(cut.step())
    cut.save()
    again = make(tmp_path / "cut")
    again.train()
    assert fingerprint(again) == fingerprint(whole)
    rows = metrics(tmp_path / "cut")
    assert list(map(comparable, rows)) == list(map(comparable, metrics(tmp_path / "whole")))
    assert any(row["grad_norm"] > 0 for row in rows)
    assert all(row["mismatch_mean"] < 1e-4 for row in rows if "mismatch_mean" in row)


@pytest.mark.real
def test_a_real_chat_template_is_continued_token_by_token() -> None:
    from transformers import AutoTokenizer

    from tfgrpo.lm.local.embedded import embedded_folder

    tokenizer = AutoTokenizer.from_pretrained(str(embedded_folder()))
    eos = tokenizer.convert_tokens_to_ids("<|im_end|>")
    turns = [
        {"role": "user", "content": "2 + 3?"},
        {"role": "assistant", "content": CALL.removesuffix(END)},
        {"role": "user", "content": "Observation: 5"},
    ]

    def ids(turns: Any) -> list[int]:
        text = tokenizer.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
        return list(tokenizer(text, add_special_tokens=False)["input_ids"])

    said = tokenizer(turns[1]["content"], add_special_tokens=False)["input_ids"]
    tail = TurnText(tokenizer, template="chat", eos_ids=(eos,))
    observed = [Message("user", "Observation: 5")]
    whole = ids(turns)
    assert [*ids(turns[:1]), *said, eos, *tail(observed, [*said, eos])] == whole
    assert [*ids(turns[:1]), *said, *tail(observed, said)] == whole  # cut before its end


def test_figures_count_turns_and_calls() -> None:
    wrong = 'Action: sub {"a": 2}' + END
    groups = player(Script(wrong, CALL, ANSWER)).make(TASKS, 2, seed=1)
    figures = group_figures(groups)
    assert figures["turns_mean"] == 3.0
    assert figures["tool_calls_mean"] == figures["invalid_actions_mean"] == 1.0
    assert figures["reward_mean"] == 0.5
    assert figures["length_mean"] == len(wrong) + len(CALL) + len(ANSWER)


def test_held_out_tasks_are_played_too(tmp_path: Path) -> None:
    trainer = make(tmp_path, held_out=tiny_tasks(3, "h"))
    seen: list[list[int]] = []
    real = trainer._maker.make

    def watch(*given: Any, **named: Any) -> Any:
        groups = real(*given, **named)
        seen.append([len(r.steps) for g in groups for r in g.rollouts])
        return groups

    trainer._maker.make = watch
    assert trainer.evaluate()["tasks"] == 3
    assert max(seen[0]) > 1


def test_tools_stand_in_the_prompt_and_end_turns(tmp_path: Path) -> None:
    config = tiny_config(tmp_path, multi_turn={"tools": [f"{HERE}:echo"]})
    parts = tiny_parts()
    maker = maker_of(
        config, parts, EvenTokens(), CountingGenerator(own_generator(config, parts)), None
    )
    assert isinstance(maker, MultiTurnMaker)
    assert "echo: Say it again." in maker.prompter._system
    assert maker._sampling.stop == (STOP,)


@pytest.mark.parametrize(
    ("tools", "message"),
    [
        (["nowhere_at_all:f"], "cannot be loaded"),
        ([HERE], "give 'module:name'"),
        ([f"{HERE}:END"], "is a str, not a function"),
        (
            [f"{HERE}:echo", f"{HERE}:echo"],
            "two tools are named 'echo'",
        ),
    ],
)
def test_wrong_tools_are_named(tmp_path: Path, tools: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        tools_of(tiny_config(tmp_path, multi_turn={"tools": tools}).multi_turn)


def test_a_config_file_alone_trains_with_an_environment_beside_it(tmp_path: Path) -> None:
    from tfgrpo.cli.train import train

    write_model(tmp_path / "model")
    (tmp_path / "my_room_for_play.py").write_text(
        "from tfgrpo.messages import Message\n"
        "class Room:\n"
        "    def __init__(self, task):\n"
        "        self.left = 1\n"
        "    async def act(self, action):\n"
        "        self.left -= 1\n"
        "        return None if self.left < 0 else [Message('user', 'xyz')]\n"
        "    def facts(self):\n"
        "        return {'tool_calls': 1}\n"
    )
    rows = [{"task_id": f"t{i}", "prompt": "abc" + chr(97 + i)} for i in range(4)]
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    config = tmp_path / "train.toml"
    config.write_text(
        f"""
[model]
lm = "local:{tmp_path / "model"}"
dtype = "float32"
[tasks]
path = "tasks.jsonl"
[verifier]
kind = "regex"
pattern = "[a-m]"
[rollout]
tasks_per_step = 2
group_size = 4
max_tokens = 4
stop = {json.dumps(list("acegikmoqsuwyACEGIKMOQSUWY"))}
[rewards]
names = ["tool_cost"]
[credit]
name = "gigpo"
[multi_turn]
environment = "my_room_for_play:Room"
max_tokens = 60
[optimiser]
steps = 2
[run]
folder = "{tmp_path / "run"}"
"""
    )
    train(config, None, quiet=True)
    found = metrics(tmp_path / "run")
    assert [row["step"] for row in found] == [1, 2]
    assert (tmp_path / "run" / "model" / "model.safetensors").exists()
