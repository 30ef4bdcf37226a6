"""The settings of a learning run: one frozen model, TOML only, every mistake named.

Order: command line over file over defaults; the environment holds keys only. An unknown key is an
error that suggests the nearest known one. Paths are relative to the file they stand in.

Does not know: how a setting is used. Idea: httpx-like exact objects, readable errors (own).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from tfgrpo.config.nudge import NudgeConfig
from tfgrpo.config.sections import Section, explain, load_toml, resolve_fleets, wrong_verb
from tfgrpo.errors import ConfigError
from tfgrpo.protocols import Limits, Sampling

MAY_CHANGE = frozenset(
    {
        "budget",
        "run.folder",
        "run.store",
        "run.concurrency",
        "run.timeout_s",
        "run.retry_deadline_s",
        "run.probe",
        "run.executor",
        "run.prices",
        "workers",
        "policy.timeout_s",
        "critic.timeout_s",
        "judge.timeout_s",
        *(
            f"fleets.*.{key}"
            for key in (
                "servers", "api_key_env", "load_factor", "room", "hedge_share", "hedge_after",
                "health_s", "rest_s", "most_rest_s", "queue_metrics", "same_root",
            )
        ),
    }
)  # fmt: skip
"""Config keys that decide how a run is driven and not what it finds; a resume may change them."""


class SamplingConfig(Section):
    """How one role draws tokens."""

    temperature: float | None = Field(default=None, ge=0)
    """How widely tokens are drawn; unset leaves it to the model. At 0 the attempts of a group
    cannot differ."""
    top_p: float | None = Field(default=None, gt=0, le=1)
    """Share of the probability that tokens are drawn from; unset leaves it to the model."""
    max_tokens: int | None = Field(default=None, ge=0)
    """Limit of a reply in tokens; 0 sends none, also where a role has a limit of its own."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    logprobs: bool = False
    """Ask for the log-probability of each token."""
    reasoning_effort: str | None = None
    """How long a reasoning model thinks, in its own words, such as `low`."""
    extra: dict[str, Any] = {}
    """Further parameters of the request, sent as they are."""

    def to_sampling(self) -> Sampling:
        """Return the sampling record that requests carry."""
        return Sampling(
            temperature=self.temperature,
            top_p=self.top_p,
            max_tokens=self.max_tokens or None,
            stop=self.stop,
            logprobs=self.logprobs,
            reasoning_effort=self.reasoning_effort,
            extra=self.extra,
        )


class RoleConfig(Section):
    """The LM of one role."""

    lm: str = "local:smollm2-135m"
    """Spec string: `openai:MODEL`, `http://HOST/v1#MODEL`, `litellm:…`, `vllm:…`, `local:…`."""
    options: dict[str, Any] = {}
    """Backend options, such as `api_key_env` or `supports_n`."""
    sampling: SamplingConfig = SamplingConfig()
    timeout_s: float = Field(default=120.0, gt=0)
    """Wall time of one call."""
    first_token_s: float | None = Field(default=None, gt=0)
    """Wall time until a reply begins; unset sets no limit of its own."""

    def to_limits(self) -> Limits:
        """Return the limits that requests carry."""
        return Limits(timeout_s=self.timeout_s, first_token_s=self.first_token_s)


class PolicyConfig(RoleConfig):
    """What acts."""

    kind: Literal["chat", "tools", "function"] = "chat"
    """One reply (`chat`), a loop with tools (`tools`), or a Python function of yours
    (`function`)."""
    system: str = ""
    """The system text of the bare prompt."""
    tools: tuple[str, ...] = ()
    """Python functions as `module:name`, for kind `tools`."""
    function: str = ""
    """A sync or async function as `module:name`, for kind `function`."""
    max_steps: int = Field(default=10, ge=1)
    """Calls of one attempt at most, for kind `tools`."""


class CriticConfig(RoleConfig):
    """What contrasts good and bad attempts; empty `lm` means the policy's."""

    lm: str = ""
    context_tokens: int | None = Field(default=None, ge=256)
    """The model's window, where the backend cannot tell."""


class JudgeConfig(RoleConfig):
    """What a judging verifier asks; empty `lm` means the policy's."""

    lm: str = ""


class TasksConfig(Section):
    """Where tasks come from and how they are split."""

    path: str = ""
    """JSONL with `task_id`, `prompt`, optional `reference` and `metadata`."""
    traces: str = ""
    """JSONL of groups to learn from in place of fresh practice rollouts."""
    practice: int | None = Field(default=None, ge=1)
    """How many tasks are learnt from; sizes left out share equally what is left."""
    gate: int | None = Field(default=None, ge=0)
    """How many tasks decide what is kept: the more, the smaller a gain can be kept."""
    test: int | None = Field(default=None, ge=0)
    """How many tasks are seen once, at the end, and give the figures to quote."""
    stratify: str = ""
    """Metadata key whose values are spread evenly over the splits."""
    seed: int = 0
    """Another seed deals the tasks differently."""


class LearnConfig(Section):
    """The loop."""

    preset: Literal["default", "contrast", "paper-main", "paper-preview"] = "default"
    """How groups become lessons: `default` reflects over panels of groups, `contrast` compares one
    group at a time, the paper presets follow the published variants. A preset brings its own
    epochs, batch, group size and gate settings, which single keys override."""
    epochs: int = Field(default=2, ge=1)
    """Passes over the practice tasks (contrast: 1; paper presets: 3). With the default preset later
    passes draw only tasks that the library still gets wrong, and there is none where the gate
    leaves nothing to gain."""
    batch: int = Field(default=32, ge=1)
    """Practice tasks a step (contrast: 16; paper presets: 64 and 100)."""
    group_size: int = Field(default=4, ge=1)
    """Rollouts of a practice task (contrast: 8; paper presets: 5)."""
    seed: int = 0
    """Another seed draws other attempts, in another order."""
    entries: Literal["lessons", "exemplars", "both"] = "both"
    """What a step may propose."""
    reference_exemplars: bool = True
    """Allow a task's reference as an exemplar where every rollout failed (contrast and paper
    presets: false)."""
    objective_agent: str = ""
    """What goes in and comes out, in words, for the critic."""
    objective_learning: str = ""
    """What kind of lesson is wanted, for the critic."""
    settings: dict[str, Any] = {}
    """Further experience settings by name (caps, experiences a query, cutting, placement)."""
    ground_truth: bool = True
    """False hides rewards and answers from the critic."""
    keep_share: float = Field(default=0.8, gt=0, le=1)
    """Share of the entries that a practice task is shown, chosen by chance, so that each entry's
    effect can be told; 1 shows all. The paper presets show all."""
    random_share: float = Field(default=0.2, ge=0, lt=1)
    """Share of the practice tasks that a later pass draws by chance beside those that still fail,
    so that entries' values stay unbiased and unseen failures are found. Default preset only."""
    pool: int = Field(default=4, ge=1)
    """Accepted versions without successors that are kept as parents of further steps."""
    top_k: int = Field(default=0, ge=0)
    """Also try giving each task only its k nearest entries; 0 does not. The gate decides."""
    embedder: str = "hashed"
    """`hashed` n-grams, or the name of a sentence-transformers model."""
    allocate: str = ""
    """Who deals out the rollouts of a step, as in `[curriculum]` of a training: `practice` probes
    each task and finishes the groups that can turn out mixed, `posterior_gain`, `v0` and others, or
    `module:name`. Empty gives every task `group_size`."""
    allocate_options: dict[str, Any] = {}
    """Settings of the allocator, such as `probe` of `practice`."""


class PracticeConfig(Section):
    """How practice differs from evaluation and use."""

    sampling: SamplingConfig = SamplingConfig()
    """How the policy draws in practice and replays, over `policy.sampling`; what is evaluated and
    exported keeps the policy's own. The published method practises at temperature 0.7."""


class GateConfig(Section):
    """The gate and the final proof."""

    enabled: bool = True
    """False takes the last library without a decision: nothing is proven then."""
    group_size: int = Field(default=2, ge=1)
    """Draws of a gate task under each version (contrast: 4)."""
    min_difference: float = 0.0
    """The paired mean difference must be at least this."""
    max_harm: float = 0.01
    """The one-sided lower bound must be above minus this."""
    level: float = Field(default=0.90, gt=0.5, lt=1)
    """One-sided level of that bound over the whole run: it is shared out over the looks."""
    retry_single_edits: int = Field(default=2, ge=0)
    """How many rejected edits are tried again alone."""
    test_group_size: int = Field(default=4, ge=1)
    """Draws a test task for each arm."""


class BudgetConfig(Section):
    """The hard cap on all spend, failed calls and retries included."""

    cost_usd: float | None = Field(default=None, gt=0)
    """Money in US dollars; needs a known price for every model."""
    calls: int | None = Field(default=None, ge=1)
    """Requests to models, failed ones and retries included; an attempt of a function of yours
    counts as one."""
    prompt_tokens: int | None = Field(default=None, ge=1)
    """Tokens sent."""
    completion_tokens: int | None = Field(default=None, ge=1)
    """Tokens received, hidden reasoning included."""
    seconds: float | None = Field(default=None, gt=0)
    """Wall time of the run, earlier sessions included."""


class RunConfig(Section):
    """Where the run lives and how it is driven."""

    folder: str = Field(default="runs/learn", min_length=1)
    """Where the run writes; the same command on the same folder goes on where it ended."""
    store: str = ""
    """Address of a PostgreSQL database that keeps the journal, `postgresql://USER@HOST/DATABASE`;
    empty keeps it in the folder."""
    concurrency: int = Field(default=32, ge=1)
    """Attempts in flight at most."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Wall time of one rollout."""
    on_truncated: Literal["exclude", "grade"] = "exclude"
    """What a reply that was cut at its limit becomes: left out of its group (`exclude`), or judged
    as it stands (`grade`)."""
    probe: int = Field(default=4, ge=0)
    """Attempts in flight until the first one has been scored, so that a wrong key costs a handful
    of calls; 0 starts at full width."""
    cache: bool = True
    """False asks again even for what the journal holds."""
    retry_deadline_s: float = Field(default=300.0, gt=0)
    """How long one call may be tried again after failures that pass."""
    executor: Literal["local", "processes", "ray"] = "local"
    """Where rollouts run: in this process, in worker processes of this machine, or on Ray."""
    prices: dict[str, dict[str, float]] = {}
    """Prices by model id in dollars per million tokens: input, output, cache_read, cache_write."""


class WorkersConfig(Section):
    """Workers of a run whose `run.executor` is not `local`."""

    count: int = Field(default=0, ge=0)
    """How many; 0 is one for each core, of this machine or of the cluster."""
    env: tuple[str, ...] = ()
    """Environment variables that worker processes get though their names speak of a key."""
    address: str = ""
    """Ray: HOST:PORT of the cluster's head; empty starts one on this machine for the run."""
    cpus: float = Field(default=1.0, gt=0)
    """Ray: cores of one worker."""
    listen: str = ""
    """Ray: HOST:PORT on which this process answers its workers, on a network that they reach; port
    0 takes a free one. Empty is this machine alone."""
    object_store_mb: int = Field(default=200, ge=80)
    """Ray: object store of a cluster that is started here."""


PRESET_VALUES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "contrast": {
        "learn": {"epochs": 1, "batch": 16, "group_size": 8, "reference_exemplars": False},
        "gate": {"group_size": 4},
    },
    "paper-main": {
        "learn": {"epochs": 3, "batch": 64, "group_size": 5, "reference_exemplars": False},
        "gate": {"enabled": False},
    },
    "paper-preview": {
        "learn": {"epochs": 3, "batch": 100, "group_size": 5, "reference_exemplars": False},
        "gate": {"enabled": False},
    },
}
"""What a preset sets beside how groups become lessons. Source: the published defaults."""


class Config(Section):
    """All settings of a learning run."""

    run: RunConfig = RunConfig()
    tasks: TasksConfig = TasksConfig()
    policy: PolicyConfig = PolicyConfig()
    critic: CriticConfig = CriticConfig()
    judge: JudgeConfig = JudgeConfig()
    verifier: dict[str, Any] = {"kind": "exact"}
    """What judges attempts, by `kind` with its own keys. Kind `none` with `by = "critic"` or
    `"majority"` learns without rewards: unverified, without gate and proof."""
    learn: LearnConfig = LearnConfig()
    practice: PracticeConfig = PracticeConfig()
    repairs: dict[str, bool] = {}
    """Single repairs of the published algorithm, over the preset's."""
    nudge: NudgeConfig = NudgeConfig()
    gate: GateConfig = GateConfig()
    budget: BudgetConfig = BudgetConfig()
    workers: WorkersConfig = WorkersConfig()
    fleets: dict[str, dict[str, Any]] = {}
    """Many servers of one model, by the name that `fleet:NAME` gives them: `servers` (URLs, or a
    file of them), `model`, `revision` and what else docs/scale.md lists."""

    @model_validator(mode="before")
    @classmethod
    def _with_preset(cls, values: Any) -> Any:
        """Fill in what the preset says where no key does."""
        if not isinstance(values, Mapping):
            return values
        learn = values.get("learn", {})
        name = learn.get("preset", "default") if isinstance(learn, Mapping) else learn.preset
        filled = dict(values)
        for section, keys in PRESET_VALUES.get(name, {}).items():
            given = values.get(section, {})
            if isinstance(given, Mapping):
                filled[section] = {**keys, **given}
        return filled

    @classmethod
    def from_mapping(cls, values: Mapping[str, Any], source: str = "config") -> Self:
        """Check a nested mapping.

        Raises:
            ConfigError: naming each key, its value, what is allowed and the nearest known key.
        """
        try:
            return cls.model_validate(values)
        except ValidationError as exc:
            told = wrong_verb(values, "learn", source) + explain(exc, cls, source)
            raise ConfigError(told) from None

    @classmethod
    def from_toml(cls, path: Path | str, overrides: Sequence[str] = ()) -> Self:
        """Read a TOML file and apply `key.sub=value` overrides (values as TOML).

        Raises:
            ConfigError: the file is absent, not TOML, or a key is wrong.
        """
        path = Path(path)
        values = load_toml(path, overrides)
        return cls.from_mapping(_resolve_paths(values, path.parent), str(path))

    def to_json(self) -> dict[str, Any]:
        """Return the resolved settings as JSON, for the journal; `nudge` only where it is on."""
        unused = {"nudge"} if self.nudge.kind == "off" else set()
        values: dict[str, Any] = json.loads(self.model_dump_json(exclude=unused))
        return values


def _resolve_paths(values: dict[str, Any], folder: Path) -> dict[str, Any]:
    tasks = values.get("tasks")
    if isinstance(tasks, dict):
        for key in ("path", "traces"):
            if isinstance(tasks.get(key), str) and tasks[key]:
                tasks[key] = str(folder / tasks[key])
    resolve_fleets(values, folder)
    return values
