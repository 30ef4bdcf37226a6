"""Sections of a training run's settings. Does not know which of them contradict each other."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field

from tfgrpo.config.sections import Section

Strategy = Literal["plain", "latr", "tree", "spo_chain", "echo", "april", "arpo", "turn_tree"]


class ModelConfig(Section):
    """What is trained."""

    lm: str = "local:smollm2-135m"
    """`local:smollm2-135m`, `local:PATH` or `local:ORG/NAME`."""
    hub_id: str = ""
    """ORG/NAME of the starting model on the hub, for the card and the adapters; found by itself for
    the embedded model and for `local:ORG/NAME`."""
    licence: str = ""
    """Licence of the starting model, for the card; found by itself for the embedded model."""
    dtype: Literal["bfloat16", "float32"] | None = None
    """Type of the weights that run; None is bfloat16 where the device multiplies it."""
    device: str | None = None
    """`cpu` or `cuda`; None takes a GPU where there is one."""
    system: str = ""
    """System text of the prompt."""
    template: Literal["chat", "plain"] = "chat"
    """`plain` joins the turns' texts, for models whose tokenizer has no chat template."""
    lora_rank: int = Field(default=0, ge=0)
    """0 trains every weight."""
    lora_alpha: float = Field(default=32.0, gt=0)
    """Scale of the LoRA update: alpha over rank."""
    lora_targets: tuple[str, ...] = ()
    """Projections to adapt; empty means all seven."""
    checkpoint_activations: bool = False
    """Recompute activations in the backward pass: less memory, a third more time."""
    shard: bool = False
    """With several processes: shard the trained weights over those of a host (FSDP2), for models
    that do not fit on one GPU; False keeps all weights in each process, which is faster."""


class TrainTasksConfig(Section):
    """What is practised and what is held out."""

    path: str = ""
    """JSONL of training tasks."""
    groups: str = ""
    """JSONL of saved groups, such as a search's `output.groups`, in place of `path`: they are
    trained on as they are, with their scores; nothing is sampled but held-out tasks."""
    held_out: str = ""
    """JSONL of evaluation tasks; never trained on, never hinted."""


class RolloutConfig(Section):
    """How groups are made."""

    tasks_per_step: int = Field(default=16, ge=1)
    """Groups of a step."""
    group_size: int = Field(default=8, ge=1)
    """Rollouts of a group."""
    max_tokens: int = Field(default=256, ge=1)
    """Limit of a reply, or of each turn."""
    temperature: float = Field(default=1.0, gt=0)
    """How widely tokens are drawn in training."""
    top_p: float = Field(default=1.0, gt=0, le=1)
    """Must be 1: a truncated draw would give wrong probability ratios."""
    stop: tuple[str, ...] = ()
    """Texts that end a reply."""
    max_rows: int = Field(default=256, ge=1)
    """Rows decoded at once; the cache's memory grows with it."""
    poll_steps: int = Field(default=16, ge=1)
    """Decoding steps between two looks at finished rows."""
    fixed_rows: bool = False
    """Decode with a constant row count: bit-exact under any batch, slower at the tail."""
    ignore_eos: bool = False
    """Every completion reaches `max_tokens` (for measurements)."""
    on_truncated: Literal["grade", "exclude"] = "grade"
    """Judge a reply that hit its limit, or leave it out of its group."""
    verifier_timeout_s: float = Field(default=120.0, gt=0)
    """Wall time of one verification."""
    max_skipped_steps: int = Field(default=5, ge=1)
    """Steps in a row whose every reply is cut at its limit, and which are skipped, before the run
    stops."""
    max_unscored_share: float = Field(default=0.5, ge=0, le=1)
    """Share of a step's rollouts that could not be scored (a verifier, judge or environment that
    failed) above which the run stops with the first cause."""
    strategy: Strategy = "plain"
    """How a group's rollouts are made: each alone (`plain`), branching at uncertain tokens (`latr`,
    `echo`), as leaves of a tree (`tree`), with values at cuts (`spo_chain`), over several steps
    (`april`); with [multi_turn] branching at turns (`arpo`, `turn_tree`)."""
    strategy_options: dict[str, Any] = {}
    """Options of the strategy."""
    mismatch_mean: float = Field(default=0.1, gt=0)
    """Mean |Δ log-prob| between generator and trainer, nats, beyond which training stops.
    bfloat16 logits alone give 0.01 to 0.04 (measured on an H100)."""
    mismatch_row: float = Field(default=1.0, gt=0)
    """The same for a whole row's sum, nats times the root of the longest row's tokens. A rarely
    drawn token alone can differ by a nat in bfloat16."""


class LossConfig(Section):
    """What is minimised."""

    name: str = "clip"
    """Entry of the registry of losses (docs/rl_registry.md)."""
    options: dict[str, float | str] = {}
    """Options of the loss."""
    aggregation: str = ""
    """How token losses become one number; empty takes the loss's own (`token_mean` for most)."""
    advantage: str = "grpo"
    """An advantage a rollout; see [credit] for advantages a token."""
    advantage_options: dict[str, float | str] = {}
    """Options of the advantage."""
    answer_pattern: str = ""
    """Finds the final answer in a reply, for entries that need `answers`; empty takes what stands
    in the last box, else the last number, else the whole text."""
    kl: float = Field(default=0.0, ge=0)
    """Weight of the k3 estimate of KL(policy ‖ start)."""
    kl_end: float | None = Field(default=None, ge=0)
    """Weight at the last step, reached in a line from `kl` (GRPO-D of OThink-MR1, abstract: an
    approximation); empty keeps it. Where the weight is 0 no reference pass is made."""
    entropy: float = 0.0
    """Weight of an entropy bonus."""
    entropy_target: float | None = Field(default=None, gt=0)
    """Nats a token; the bonus is on in steps whose last batch had a mean entropy below it
    (Confucius3-Math, abstract: an approximation). Empty keeps it on."""
    log_entropy: bool = False
    """Write the mean entropy of each step to the metrics."""
    skip_zero_advantage: bool = True
    """Leave rows without a gradient out of the forward; exact, since they still count in the
    normaliser."""


class RewardsConfig(Section):
    """How rewards are reshaped before advantages are taken."""

    names: tuple[str, ...] = ()
    """Entries of the registry, applied in this order."""
    options: dict[str, dict[str, float | str]] = {}
    """Options of each, by its name."""


class CreditConfig(Section):
    """Advantages finer than a rollout; takes the place of `loss.advantage`."""

    name: str = ""
    """Entry of the registry of credit; empty gives every token of a rollout its advantage."""
    options: dict[str, float | str] = {}
    """Options of the entry."""
    state: Literal["", "observation", "history"] = ""
    """When two steps start from the same state: equal last observation, or all tokens so far equal.
    Empty takes what the entry means: `history` for trees, else `observation`."""
    phrases: tuple[str, ...] = ()
    """Texts whose tokens count as planning (`hicra`), or that begin a call (`call_entropy`)."""
    separator: str = ""
    """Ends a step of a reply of one turn, such as a line of a list; empty leaves replies whole."""


class MultiTurnConfig(Section):
    """Rollouts of several turns; off while both `tools` and `environment` are empty."""

    tools: tuple[str, ...] = ()
    """Python functions as `module:name`."""
    calls: Literal["text", "native"] = "text"
    """How tools are offered and called: as text (`Action: name {json}`), or in the form of the
    model's own chat template (`<tool_call>`)."""
    environment: str = ""
    """`module:name`, called with a task for each rollout; returns an `Environment`."""
    max_turns: int = Field(default=8, ge=1)
    """Turns of a rollout at most."""
    max_tokens: int = Field(default=2048, ge=2)
    """Of the whole sequence, prompt included; `rollout.max_tokens` limits each turn."""
    tool_timeout_s: float = Field(default=60.0, gt=0)
    """Wall time of one tool call."""
    max_observation_chars: int = Field(default=4000, ge=1)
    """Longest observation that a prompt holds; more is cut."""

    @property
    def is_on(self) -> bool:
        """True when rollouts have several turns."""
        return bool(self.tools or self.environment)


class EngineConfig(Section):
    """What makes tokens."""

    kind: Literal["own", "vllm", "vllm-server"] = "own"
    """`own` samples from the trained weights; `vllm` in this process; `vllm-server` over HTTP."""
    base_url: str = "http://127.0.0.1:8000/v1"
    """Address of the server, for kind `vllm-server`."""
    base_urls: tuple[str, ...] = ()
    """Addresses of several servers that were started from `folder`, in place of `base_url`."""
    max_staleness: int = Field(default=0, ge=0, le=1)
    """Updates by which the weights that sample may be behind those that are trained, for kind
    `vllm-server`: 1 samples the next step while this one is trained."""
    model: str = ""
    """The served name; empty means `folder`."""
    folder: str = ""
    """Where the server was started from (`vllm serve FOLDER`); new weights are written there."""
    options: dict[str, Any] = {}
    """Further arguments of `vllm.LLM`, for kind `vllm`."""
    api_key_env: str = ""
    """Environment variable that holds the server's key."""
    concurrency: int = Field(default=64, ge=1)
    """Requests in flight at a server."""
    timeout_s: float = Field(default=600.0, gt=0)
    """Wall time of one request."""


class CurriculumConfig(Section):
    """Which tasks are rolled, how often, and what is used again."""

    profile: int = Field(default=0, ge=0)
    """Draws a training task before the first step; 0 makes no profiling pass."""
    band: tuple[float, float] = (0.0, 1.0)
    """Success shares, both included, between which the profiling pass keeps a task."""
    unsolved_share: float = Field(default=0.0, ge=0, le=1)
    """Share of the tasks without any success in the profiling pass that are kept all the same."""
    success_above: float = 0.0
    """A larger reward is a success."""
    order: Literal["shuffled", "easy_first"] = "shuffled"
    """`easy_first`: by falling share of the profiling pass, the same in every epoch."""
    rest_epochs: int = Field(default=0, ge=0)
    """Epochs that a task rests whose last group's share lay outside `band`; 0 never rests any."""
    allocate: str = ""
    """What gives group sizes: `practice` (a probe first, then what can turn out mixed),
    `posterior_gain`, `v0`, `sgpo`, `vade`, `xrpo`, `dars`, `gdro`, or `module:name` of a class
    whose objects are `Allocator`s."""
    allocate_options: dict[str, Any] = {}
    """Options of the allocator."""
    candidates: Literal["step", "all"] = "step"
    """What the allocator chooses from: the step's tasks, or all of them."""
    max_resample_rounds: int = Field(default=1, ge=1)
    """Rounds of tasks a step at most, until it is full of groups whose rewards differ; the others
    are dropped. 1 takes one round as it is."""
    replay: int = Field(default=0, ge=0)
    """Past groups whose rewards differ, added to a step."""
    refill: int = Field(default=0, ge=0)
    """Most past rollouts of the other outcome that a flat group is given in the place of its own
    (R3)."""
    replay_keep: int = Field(default=64, ge=1)
    """Past groups that are kept for replay."""
    replay_age: int = Field(default=8, ge=1)
    """Steps after which a kept group is forgotten."""
    select: Literal["", "rorecomp"] = ""
    """Which rollouts of a step are trained now and which later; `rorecomp` trains short right and
    long wrong ones, and every `every` steps what was left (approximation)."""
    select_options: dict[str, float] = {}
    """`share` trained now, `every` steps, `keep` rollouts at most, `success_above`."""

    @property
    def reuses(self) -> bool:
        """True where rollouts that older weights sampled may be trained on."""
        return bool(self.replay or self.refill or self.select)


class OptimiserConfig(Section):
    """How weights move."""

    steps: int = Field(default=100, ge=1)
    """Training steps."""
    lr: float = Field(default=1e-6, gt=0)
    """Learning rate."""
    schedule: Literal["constant", "linear", "cosine"] = "constant"
    """How the learning rate goes on after the warm-up."""
    warmup: int = Field(default=0, ge=0)
    """Steps over which the learning rate rises from 0."""
    weight_decay: float = Field(default=0.0, ge=0)
    """Decoupled weight decay of AdamW."""
    max_norm: float = Field(default=1.0, ge=0)
    """Gradients are scaled down to this norm; 0 does not."""
    beta1: float = Field(default=0.9, ge=0, lt=1)
    """Decay of the first moment."""
    beta2: float = Field(default=0.999, ge=0, lt=1)
    """Decay of the second moment."""
    moments: Literal["float32", "bfloat16"] = "float32"
    """`bfloat16` takes 4 bytes a parameter less; rounded by chance, so right on average."""
    epochs_per_batch: int = Field(default=1, ge=1)
    """How often a batch of groups is used."""
    updates_per_epoch: int = Field(default=1, ge=1)
    """Optimiser batches that a batch of groups is cut into."""
    micro_batch_tokens: int = Field(default=8192, ge=16)
    """Input tokens of one forward; lower it when memory runs out."""
    vocabulary_chunk: int = Field(default=2048, ge=1)
    """Tokens whose logits exist at once."""


class TrainRunConfig(Section):
    """Where the run lives."""

    folder: str = "runs/train"
    """Where checkpoints, metrics and the model are written; the same command goes on from the last
    checkpoint."""
    seed: int = 0
    """Seeds every draw of the run."""
    save_every: int = Field(default=50, ge=1)
    """Steps between checkpoints."""
    keep: int = Field(default=2, ge=1)
    """Checkpoints kept."""
    save_optimiser: bool = True
    """Keep the optimiser's state in checkpoints; without it they take half the place, and a resumed
    run starts the optimiser anew."""
    evaluate_every: int = Field(default=0, ge=0)
    """Steps between held-out evaluations; 0 evaluates at the end only."""
    evaluate_before: bool = True
    """Score the held-out tasks before the first step, too: the gain of training is known then."""
    evaluate_draws: int = Field(default=1, ge=1)
    """Draws a held-out task."""
    evaluate_temperature: float = Field(default=0.0, ge=0)
    """Of held-out draws; 0 takes the likeliest token."""
    deterministic: bool = True
    """Equal runs give equal bits on the same machine."""
    tensorboard: bool = False
    """Also write TensorBoard scalars into the folder."""
    tracker: Literal["", "wandb", "trackio"] = ""
    """Also report to Weights & Biases or trackio."""
    keep_samples: int = Field(default=2, ge=0)
    """Groups of each step whose replies are kept for `tfgrpo view`."""
    push_to_hub: str = ""
    """ORG/NAME to upload the trained model to; the token is the one of `hf auth login`."""
    hub_private: bool = True
    """The uploaded repository is private."""
