"""`tfgrpo search CONFIG.toml`: search each task and keep what was found.

One JSON line a task goes to standard output, the tree of the best path and a summary to standard
error. Exit code 0 where every task was solved, 4 where a limit stopped an unsolved one, else 1.

Does not know algorithms. Source: own.
"""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import typer

from tfgrpo.context import Context, ContextPart
from tfgrpo.errors import ConfigError, boundary
from tfgrpo.lm import open_lm
from tfgrpo.lm.retry import RetryingLM
from tfgrpo.messages import Message
from tfgrpo.protocols import LM, ToolSpec, Verifier
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.runtime.files import write_for_people
from tfgrpo.search.api import make_algorithm, search_tree
from tfgrpo.search.config import SearchConfig, WorldSection, read_config
from tfgrpo.search.environments.mcp import McpEnvironment
from tfgrpo.search.environments.protocol import Environment, TextEnvironment
from tfgrpo.search.event_log import FileLog
from tfgrpo.search.groups import group_of
from tfgrpo.search.plan_memory import PlanMemory
from tfgrpo.search.proposers.expander import CheckedExpander, Expander
from tfgrpo.search.proposers.lm import JudgeScorer, LMExpander, LMImagination
from tfgrpo.search.scorers.scorer import FrequencyScorer, LikelihoodScorer, Scorer, UnitScorer
from tfgrpo.search.scorers.toolchain import ToolChainScorer, cost_preset
from tfgrpo.search.settings import SearchResult, SearchSettings
from tfgrpo.search.views import to_ascii, to_html
from tfgrpo.store.budget import Budget
from tfgrpo.store.priced_lm import PricedLM
from tfgrpo.store.prices import PriceTable
from tfgrpo.tasks.files import read_tasks

__all__ = ["app", "run_config", "search_command"]


@dataclass(slots=True)
class Found:
    """What a run of the command found."""

    groups: list[RolloutGroup] = field(default_factory=list)
    results: list[SearchResult] = field(default_factory=list)

    @property
    def exit_code(self) -> int:
        """0 all solved, 4 stopped by a limit, 1 otherwise."""
        unsolved = [r for r in self.results if not r.is_solved]
        if not unsolved:
            return 0
        return 4 if any(r.stop_reason.startswith("budget") for r in unsolved) else 1


def search_command(
    config: Annotated[Path, typer.Argument(help="TOML file with the settings of the search.")],
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No trees on stderr.")] = False,
) -> None:
    """Search plans of tool calls for each task of a TOML file."""
    found = asyncio.run(run_config(read_config(config), show=not quiet))
    if found.exit_code:
        raise typer.Exit(found.exit_code)


app = typer.Typer(add_completion=False)
app.command()(search_command)


async def run_config(config: SearchConfig, *, lm: LM | None = None, show: bool = False) -> Found:
    """Search every task of the settings, one after another.

    Args:
        lm: used instead of the one that the settings name; it is not closed.
        show: print the best path's tree of each task to standard error.
    """
    tasks = read_tasks(config.tasks)
    found = Found()
    async with AsyncExitStack() as stack:
        model = lm if lm is not None else await _open_model(config, stack)
        memory = _memory(config.output.memory)
        verifier = _verifier(config)
        for task in tasks:
            result = await _search_task(config, task, model, memory, verifier, stack)
            group = await _group(config, result, verifier)
            memory.add_group(group)
            found.results.append(result)
            found.groups.append(group)
            _print(result, group, show)
            if result.error is not None and getattr(result.error, "is_fatal", False):
                raise result.error
        _keep(config, found, memory)
    return found


async def _open_model(config: SearchConfig, stack: AsyncExitStack) -> LM:
    lm: LM = open_lm(config.model.lm, **config.model.options)
    stack.push_async_callback(lm.aclose)
    prices = PriceTable(config.model.prices or None)
    if config.output.run is not None:
        from tfgrpo.store import Journal, JournaledLM

        store = Journal.open(config.output.run, create=True, config={"search": "calls"})
        stack.callback(store.close)
        return RetryingLM(JournaledLM(lm, store, prices=prices))
    return RetryingLM(PricedLM(lm, prices.find(lm.model_id)))


def _memory(path: Path | None) -> PlanMemory:
    return PlanMemory.load(path) if path is not None and path.exists() else PlanMemory()


def _verifier(config: SearchConfig) -> Verifier | None:
    if not config.verifier:
        return None
    from tfgrpo.verifiers import make_verifier

    return make_verifier(config.verifier)


async def _search_task(
    config: SearchConfig,
    task: Task,
    lm: LM,
    memory: PlanMemory,
    verifier: Verifier | None,
    stack: AsyncExitStack,
) -> SearchResult:
    if verifier is not None:
        verifier.check_task(task)
    environment = await _world(config.world, task, stack)
    tools: tuple[ToolSpec, ...] = tuple(getattr(environment, "specs", ()))
    model = config.model
    expander: Expander = LMExpander(
        lm,
        tools,
        system=model.system,
        sampling=model.sampling.to_sampling(),
        form=model.form,
        describe_tools=model.describe_tools,
        show_siblings=model.show_siblings,
    )
    if hasattr(environment, "check"):
        expander = CheckedExpander(expander, environment.check)
    section = config.search
    log = None
    if config.output.logs is not None:
        log = FileLog(config.output.logs / f"{_file_name(task)}.jsonl")
        stack.callback(log.close)
    return await search_tree(
        task,
        expander,
        environment,
        algorithm=make_algorithm(section.algorithm, **section.algorithm_options),
        scorer=_scorer(config, lm, tools, memory),
        settings=SearchSettings(
            samples=section.samples,
            mode=section.mode,
            concurrency=section.concurrency,
            lookahead=section.lookahead,
            execution=section.execution,
            merge=section.merge,
            verify=section.verify,
            verifier_timeout_s=section.verifier_timeout_s,
            patience=section.patience,
            seed=section.seed,
        ),
        budget=Budget(**config.budget.model_dump()),
        context=_context(config),
        verifier=verifier,
        log=log,
    )


def _context(config: SearchConfig) -> Context:
    return Context(
        tuple(
            ContextPart("exemplar", turns=tuple(Message(role, text) for role, text in turns))
            for turns in config.model.examples
        )
    )


def _scorer(
    config: SearchConfig, lm: LM, tools: tuple[ToolSpec, ...], memory: PlanMemory
) -> Scorer:
    name, options = config.search.scorer, config.search.scorer_options
    if options and name not in ("robust", "paper"):
        raise ConfigError(
            f"search.scorer_options {sorted(options)} belong to the scorers robust and paper; "
            f"search.scorer is {name}"
        )
    if name == "judge":
        return JudgeScorer(lm)
    simple: dict[str, Callable[[], Scorer]] = {
        "frequency": FrequencyScorer,
        "likelihood": LikelihoodScorer,
        "unit": UnitScorer,
    }
    if name in simple:
        return simple[name]()
    imagination = LMImagination(lm, tools) if config.search.imagination else None
    return ToolChainScorer(memory, preset=cost_preset(name, options), imagination=imagination)


async def _world(world: WorldSection, task: Task, stack: AsyncExitStack) -> Environment:
    if world.mcp:
        server: Any = world.mcp if isinstance(world.mcp, str) else list(world.mcp)
        environment = McpEnvironment(
            server,
            is_simulator=world.is_simulator,
            effects=world.effects,
            timeout_s=world.timeout_s,
        )
        stack.push_async_callback(environment.close)
        return await environment.open()
    if not world.python:
        return TextEnvironment()
    with boundary(ConfigError, f"[world] python = {world.python!r}"):
        made: Environment = _factory(world.python)(task)
    return made


def _factory(spec: str) -> Callable[[Task], Any]:
    """Return the function that `file.py:name` or `module:name` names."""
    place, _, name = spec.rpartition(":")
    if not place or not name:
        raise ConfigError(f"[world] python = {spec!r}: write file.py:function or module:function")
    if place.endswith(".py"):
        path = Path(place)
        if not path.is_file():
            raise ConfigError(f"[world] python: no file {place!r}")
        found = importlib.util.spec_from_file_location(f"tfgrpo_world_{path.stem}", path)
        assert found is not None and found.loader is not None
        module = importlib.util.module_from_spec(found)
        found.loader.exec_module(module)
    else:
        module = importlib.import_module(place)
    if not hasattr(module, name):
        raise ConfigError(f"[world] python: {place!r} has no {name!r}")
    factory: Callable[[Task], Any] = getattr(module, name)
    return factory


async def _group(
    config: SearchConfig, result: SearchResult, verifier: Verifier | None
) -> RolloutGroup:
    return await group_of(
        result,
        verifier=verifier,
        context=_context(config),
        policy_id=f"search:{config.search.algorithm}:{config.model.lm}",
        seed=config.search.seed,
        include_failed=True,
        verifier_timeout_s=config.search.verifier_timeout_s,
    )


def _print(result: SearchResult, group: RolloutGroup, show: bool) -> None:
    row = {
        "task_id": result.task.task_id,
        "solved": result.is_solved,
        "stop_reason": result.stop_reason,
        "plan": result.plan,
        "rewards": list(group.rewards_G),
        "counters": result.counters,
        "calls": result.usage.calls,
        "prompt_tokens": result.usage.prompt_tokens,
        "cached_tokens": result.usage.cache_read_tokens,
        "completion_tokens": result.usage.completion_tokens,
    }
    sys.stdout.write(json.dumps(row) + "\n")
    sys.stdout.flush()
    if show:
        tree = to_ascii(result.fold.tree, best=result.best.id, max_nodes=40)
        sys.stderr.write(f"{result.task.task_id}: {result.stop_reason}\n{tree}\n")


def _keep(config: SearchConfig, found: Found, memory: PlanMemory) -> None:
    output = config.output
    if output.groups is not None:
        from tfgrpo.store import write_groups

        output.groups.parent.mkdir(parents=True, exist_ok=True)
        write_groups(output.groups, found.groups)
    if output.memory is not None:
        output.memory.parent.mkdir(parents=True, exist_ok=True)
        memory.save(output.memory)
    if output.views is not None:
        output.views.mkdir(parents=True, exist_ok=True)
        for result in found.results:
            facts = {"stopped": result.stop_reason, **result.counters}
            page = to_html(
                result.fold.tree, best=result.best.id, title=result.task.task_id, facts=facts
            )
            path = output.views / f"{_file_name(result.task)}.html"
            write_for_people(path, page)


def _file_name(task: Task) -> str:
    """Return a file name of our own making: ids may hold anything."""
    from tfgrpo.runtime.canonical import digest

    kept = "".join(c if c.isascii() and (c.isalnum() or c in "-_") else "_" for c in task.task_id)
    return kept[:40] if kept == task.task_id and kept else f"{kept[:30]}-{digest(task.task_id, 8)}"
