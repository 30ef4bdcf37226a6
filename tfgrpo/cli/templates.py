"""What `tfgrpo init` writes: one small project per template, ready to run or to fill in.

Does not know the command line. Source: own texts.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import combinations

_HEAD = """\
# {title}
# `tfgrpo config show FILE` prints every setting with its value; an unknown key is an error.

[run]
folder = {folder}            # the journal lives here; the same command goes on where it ended
on_truncated = "grade"         # a reply cut at max_tokens is judged as it stands

[tasks]
path = "tasks.jsonl"           # task_id, prompt, reference; CSV works as well
practice = {practice}                  # learnt from
gate = {gate}                      # decides what is kept
test = {test}                      # seen once, at the end: the figures you may quote
"""

_LEARN = """\

[budget]
calls = 3000                   # a hard cap over everything, retries included
"""

_NO_CRITIC = """\

[learn]
entries = "exemplars"          # lessons, exemplars or both; lessons need a model that can compare
epochs = 1
group_size = 4

[learn.settings]
exemplars = 4                  # most worked examples in the prompt

[gate]
group_size = 2
test_group_size = 2
"""

_EXTRACTION_VERIFIER = '''\
"""A verifier: any function of (rollout, task) that returns a number, a bool or a Score."""

import re

from tfgrpo import Score


def score(rollout, task):
    """Full reward for the value alone, a part mark for a reply that holds it."""
    if rollout.answer.strip().rstrip(".") == str(task.reference):
        return Score(1.0, "exactly the value")
    if str(task.reference) in re.findall(r"[\\w-]+", rollout.answer):
        return Score(0.3, "the value stands among other words: answer with the value only")
    return Score(0.0, "the value is not in the reply")
'''

_OPENINGS = (
    "Order {n} was due on Monday.",
    "My sister bought a lamp under {n}.",
    "This is about {n}, the blue chair.",
    "You charged me twice for {n}.",
    "Yesterday {n} came without the manual.",
    "We returned half of {n} in June.",
    "For {n} I paid 18 euros too much.",
    "I placed {n} at 9 this morning.",
    "The box of {n} is dented.",
    "Purchase {n} is a birthday present.",
)
_REQUESTS = (
    "The tracking page stays blank.",
    "Can you cancel it, please?",
    "Where is it right now?",
    "Please send 2 new screws.",
    "Could I collect it at the shop?",
    "Who can tell me more?",
    "Is there a refund?",
    "Change the street to Mill Lane 4.",
)


def _extraction_rows() -> list[dict[str, str]]:
    numbers = [(481920 + 77777 * i) % 900000 + 100000 for i in range(60)]
    return [
        {
            "task_id": f"order-{i:02d}",
            "prompt": f"{_OPENINGS[i % 10].format(n=n)} {_REQUESTS[(3 * i + i // 10) % 8]}\n\n"
            "Which order number?",
            "reference": str(n),
        }
        for i, n in enumerate(numbers)
    ]


_TICKETS: Mapping[str, tuple[str, ...]] = {
    "billing": (
        "I was charged twice this month.",
        "The invoice shows a fee that nobody told me of.",
        "Which card do you bill in May?",
        "Please send the receipt for my last payment.",
        "My refund has not reached the bank.",
        "Why did the price go up by three euros?",
        "Can I pay by direct debit instead?",
        "You took money for a plan I cancelled.",
        "The voucher was not deducted from the total.",
        "I need an invoice with our VAT number on it.",
        "How many instalments are left to pay?",
        "The discount for students is missing.",
        "My bank refused the payment, what now?",
        "Two amounts on the statement make no sense.",
        "When is the next debit due?",
        "Please split the bill between two cards.",
        "I overpaid and would like the difference back.",
        "Is there a charge for paying late?",
        "The currency on my bill is wrong.",
        "Stop the automatic payments, please.",
    ),
    "delivery": (
        "The parcel says delivered and nothing is here.",
        "Can the courier come after six?",
        "My box has been in the depot for a week.",
        "The driver left it at the wrong door.",
        "When will it be shipped?",
        "The package arrived soaked by rain.",
        "Could you send it to my office instead?",
        "Tracking stopped at the border on Friday.",
        "Half of the goods are missing from the carton.",
        "Is there a pick-up point near the station?",
        "Nobody rang and the van drove off.",
        "How long does shipping to Norway take?",
        "The neighbour signed for it and is away.",
        "Please hold the shipment until we are home.",
        "The carrier asks for a number I never got.",
        "It was sent back to you without a reason.",
        "Does the truck bring it up to the third floor?",
        "I moved: route the crate to the new street.",
        "What day can I expect the sofa?",
        "The label on the carton has another name.",
    ),
    "account": (
        "I cannot log in since the update.",
        "How do I change my e-mail address?",
        "Please close my profile.",
        "The password link has expired.",
        "Two people need access to one login.",
        "Somebody else signed in as me last night.",
        "The code for the second step never comes.",
        "My user name is misspelt everywhere.",
        "How can I download all my data?",
        "I locked myself out after five tries.",
        "Merge my old profile with this one.",
        "Where do I switch off the newsletter?",
        "The settings page stays grey.",
        "Can my daughter have her own sign-in?",
        "Reset the security question, please.",
        "It says that my membership does not exist.",
        "I want to use my phone to sign in.",
        "Remove the photo next to my name.",
        "Which address did I register with?",
        "The app logs me off every hour.",
    ),
}


def _classification_rows() -> list[dict[str, str]]:
    rows = [(label, texts[i]) for i in range(20) for label, texts in _TICKETS.items()]
    return [
        {"task_id": f"ticket-{i:02d}", "prompt": text, "reference": label}
        for i, (label, text) in enumerate(rows)
    ]


_AGENT = '''\
"""The agent under test: any sync or async function of (prompt, context, seed).

This one imitates worked examples, as a small model does: without any it writes in capitals in one
of three attempts. Put your own agent here; what was learnt is in `context`: lessons as
`context.parts[i].text`, worked examples as `context.parts[i].turns`.
"""


def agent(prompt, context, seed=0):
    examples = [t.content for part in context.parts for t in part.turns if t.role == "assistant"]
    shouts = any(text.isupper() for text in examples) or seed % 3 == 0
    return prompt.upper() if shouts else prompt
'''

_FUNCTION_VERIFIER = '''\
"""A verifier: any function of (rollout, task) that returns a number, a bool or a Score."""


def score(rollout, task):
    return rollout.answer == task.reference
'''

_TOOLS = '''\
"""Tools of the agent: plain functions with type hints; the docstring is what the model reads."""

PRICES = {
    "mug": 12, "lamp": 45, "chair": 89, "rug": 130, "clock": 34, "vase": 27,
    "shelf": 76, "kettle": 39, "mirror": 58, "bench": 149, "basket": 18, "stool": 63,
}


def price_of(article: str) -> int:
    """Return the price of an article in euros."""
    return PRICES[article]


def add(a: float, b: float) -> float:
    """Return a + b."""
    return a + b


def times(a: float, b: float) -> float:
    """Return a times b."""
    return a * b
'''
_PRICES = {
    "mug": 12, "lamp": 45, "chair": 89, "rug": 130, "clock": 34, "vase": 27,
    "shelf": 76, "kettle": 39, "mirror": 58, "bench": 149, "basket": 18, "stool": 63,
}  # fmt: skip
_BASKETS = (
    "What do {n} of the {a} and one {b} cost together?",
    "I put one {b} and {n} times the {a} into my basket. Total?",
    "Sum up, please: {a} (we need {n}), {b} (a single one).",
    "A customer takes a {b}, then {n} pieces of {a}: how much is it?",
    "Our office orders {a} in a quantity of {n} plus a {b}. The amount?",
    "For the {b} and the {a}, of which there are {n}, I owe you what?",
)


def _tool_rows() -> list[dict[str, str]]:
    pairs = [(a, b) for a, b in combinations(_PRICES, 2)][:60]
    return [
        {
            "task_id": f"basket-{i:02d}",
            "prompt": _BASKETS[i % 6].format(n=2 + i % 5, a=a, b=b),
            "reference": str((2 + i % 5) * _PRICES[a] + _PRICES[b]),
        }
        for i, (a, b) in enumerate(pairs)
    ]


@dataclass(frozen=True, slots=True)
class Template:
    """A project that `init` writes."""

    summary: str
    """One line for the command's help."""
    sizes: tuple[int, int, int]
    """Practice, gate and test tasks."""
    body: str
    """The config after its [tasks] section."""
    rows: Callable[[], Sequence[Mapping[str, str]]]
    files: Mapping[str, str] = field(default_factory=dict)
    """Further files beside config and tasks."""
    needs: str = ""
    """What a person must do before it runs; empty where it runs as it is."""

    def written(self, folder: str) -> dict[str, str]:
        """Return file names and their texts."""
        practice, gate, test = self.sizes
        head = _HEAD.format(
            title=self.summary,
            folder=json.dumps(folder, ensure_ascii=False),  # a text of JSON is one of TOML
            practice=practice,
            gate=gate,
            test=test,
        )
        tasks = "".join(json.dumps(dict(row), ensure_ascii=False) + "\n" for row in self.rows())
        return {"config.toml": head + self.body + _LEARN, "tasks.jsonl": tasks, **self.files}


_LOCAL = """\

[policy]
lm = "local:smollm2-135m"      # or openai:MODEL, http://127.0.0.1:8000/v1#MODEL, litellm:…
system = "{system}"
sampling = {{ temperature = 0.7, max_tokens = {tokens} }}
timeout_s = 900                # a call waits its turn on the one local engine
"""

_OWN_VERIFIER = """\

[verifier]
kind = "function"              # or exact, numeric, regex, json_schema, math, code, judge
function = "verifier:score"    # verifier.py beside this file
reward_range = [0.0, 1.0]      # full marks are 1: only they make worked examples
"""

TEMPLATES: Mapping[str, Template] = {
    "extraction": Template(
        "Find the order number in a customer's message",
        (16, 20, 24),
        _LOCAL.format(
            system="You read messages to a shop and answer with the value only.", tokens=12
        )
        + _OWN_VERIFIER
        + _NO_CRITIC,
        _extraction_rows,
        {"verifier.py": _EXTRACTION_VERIFIER},
    ),
    "classification": Template(
        "Sort customers' messages into billing, delivery or account",
        (16, 20, 24),
        _LOCAL.format(system="Answer with one word: billing, delivery or account.", tokens=6)
        + '\n[verifier]\nkind = "exact"\n'
        + _NO_CRITIC,
        _classification_rows,
    ),
    "function": Template(
        "Your own agent, a Python function",
        (8, 20, 20),
        '\n[policy]\nkind = "function"\nfunction = "agent:agent"     # agent.py beside this file\n'
        'lm = "scripted:echo"          # the critic\'s model, where lessons are wanted\n'
        + _OWN_VERIFIER
        + _NO_CRITIC,
        lambda: [
            {
                "task_id": f"t{i:02d}",
                "prompt": f"shout number {i}",
                "reference": f"SHOUT NUMBER {i}",
            }
            for i in range(48)
        ],
        {"agent.py": _AGENT, "verifier.py": _FUNCTION_VERIFIER},
    ),
    "tools": Template(
        "An agent with tools",
        (16, 20, 24),
        '\n[policy]\nkind = "tools"\ntools = ["tools:price_of", "tools:add", "tools:times"]\n'
        'lm = "openai:gpt-5-mini"      # or http://HOST/v1#MODEL\nmax_steps = 8\n'
        '\n[critic]\nlm = "openai:gpt-5"          # what compares; left out, the policy\'s model\n'
        '\n[verifier]\nkind = "numeric"\n'
        "\n[learn]\ngroup_size = 4\n",
        _tool_rows,
        {"tools.py": _TOOLS},
        "set OPENAI_API_KEY, or name another model in [policy] and [critic]",
    ),
    "server": Template(
        "Any OpenAI-compatible server",
        (16, 20, 24),
        '\n[policy]\nlm = "http://127.0.0.1:8000/v1#MODEL"   # ?api_key_env=NAME before #: a key\n'
        'system = "You read messages to a shop and answer with the value only."\n'
        "sampling = { temperature = 0.7, max_tokens = 64 }\n"
        "\n[learn]\ngroup_size = 4\n" + _OWN_VERIFIER,
        _extraction_rows,
        {"verifier.py": _EXTRACTION_VERIFIER},
        "put your server's address and model into policy.lm",
    ),
}
DEFAULT = "extraction"
