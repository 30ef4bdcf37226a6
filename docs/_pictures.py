"""The pictures of the documentation: boxes in columns, arrows between them, one SVG each.

A picture is text here, so that it changes in the same commit as what it shows. Colours follow the
reader's light or dark scheme. `python docs/_pictures.py` writes docs/pictures/.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path

FOLDER = Path(__file__).parent / "pictures"
_WIDTH, _HEIGHT, _GAP_X, _GAP_Y, _EDGE = 158, 50, 62, 20, 18


@dataclass(frozen=True, slots=True)
class Picture:
    """Boxes by column, and arrows by the boxes' names."""

    title: str
    columns: Sequence[Sequence[str]]
    """Each box as `name` or `name|second line`."""
    arrows: Sequence[tuple[str, ...]]
    """(from, to) or (from, to, words)."""
    strong: frozenset[str] = field(default_factory=frozenset)
    """Boxes that the page is about."""


PICTURES: Mapping[str, Picture] = {
    "overview": Picture(
        "Everything makes groups or uses groups",
        [
            ["tasks", "policy|model, tools, your agent", "context|lessons, examples, hints"],
            ["sampling|tasks × G attempts"],
            ["verifier|score, feedback", "journal|every call, one SQLite file"],
            ["RolloutGroup|attempts of one task"],
            ["experience", "routing", "search", "rl"],
            ["library", "which model", "verified plans", "weights"],
        ],
        [
            ("tasks", "sampling"), ("policy", "sampling"), ("context", "sampling"),
            ("sampling", "verifier"), ("sampling", "journal"), ("verifier", "RolloutGroup"),
            ("journal", "RolloutGroup"), ("RolloutGroup", "experience"),
            ("RolloutGroup", "routing"), ("RolloutGroup", "search"), ("RolloutGroup", "rl"),
            ("experience", "library"), ("routing", "which model"), ("search", "verified plans"),
            ("rl", "weights"),
        ],
        frozenset({"RolloutGroup"}),
    ),
    "experience": Picture(
        "From attempts to a library that is kept",
        [
            ["practice tasks"],
            ["groups|G attempts each"],
            ["panel|good beside bad"],
            ["rules, examples|proposed edits"],
            ["guards|answers, secrets, copies", "replay|cited tasks again"],
            ["gate|old beside new prompt"],
            ["library|kept, or none"],
        ],
        [
            ("practice tasks", "groups"), ("groups", "panel"), ("panel", "rules, examples"),
            ("rules, examples", "guards"), ("rules, examples", "replay"), ("guards", "gate"),
            ("replay", "gate"), ("gate", "library"), ("library", "groups", "next step"),
        ],
        frozenset({"gate"}),
    ),
    "models": Picture(
        "One call",
        [
            ["policy, critic, judge"],
            ["RetryingLM|again, at the right pace"],
            ["JournaledLM|cache, cap, intent, result"],
            ["LM|one request, typed failure"],
            ["server or local model"],
        ],
        [
            ("policy, critic, judge", "RetryingLM"), ("RetryingLM", "JournaledLM"),
            ("JournaledLM", "LM"), ("LM", "server or local model"),
        ],
        frozenset({"LM"}),
    ),
    "verifiers": Picture(
        "From an answer to a score",
        [
            ["task|reference, metadata", "attempt|answer, steps"],
            ["check_task|before anything is spent", "verifier"],
            ["rule|exact, number, schema, code", "judge|a model with a rubric", "yours|a function"],
            ["Score|reward, feedback, parts", "outcome|what could not be judged"],
        ],
        [
            ("task", "check_task"), ("task", "verifier"), ("attempt", "verifier"),
            ("verifier", "rule"), ("verifier", "judge"), ("verifier", "yours"),
            ("rule", "Score"), ("judge", "Score"), ("yours", "Score"), ("judge", "outcome"),
        ],
        frozenset({"verifier"}),
    ),
    "store": Picture(
        "Paid once, kept at once",
        [
            ["a call"],
            ["key|request, model, seed"],
            ["found|in this run or the cache", "reserve|worst case, under every cap"],
            ["reply", "intent|written first"],
            ["call the model"],
            ["result|usage, money, reply"],
        ],
        [
            ("a call", "key"), ("key", "found"), ("key", "reserve"), ("found", "reply"),
            ("reserve", "intent"), ("intent", "call the model"), ("call the model", "result"),
            ("result", "reply", "kept, then returned"),
        ],
        frozenset({"intent"}),
    ),
    "statistics": Picture(
        "What the figures rest on",
        [
            ["rewards by task"],
            ["task means|a task is the unit"],
            ["paired difference|new − old"],
            ["interval|bootstrap over tasks", "noise floor|the same twice"],
            ["gate|level shared over looks", "verdict|test split, once"],
        ],
        [
            ("rewards by task", "task means"), ("task means", "paired difference"),
            ("paired difference", "interval"), ("paired difference", "noise floor"),
            ("interval", "gate"), ("interval", "verdict"), ("noise floor", "verdict"),
        ],
        frozenset({"interval"}),
    ),
    "report": Picture(
        "One summary, many forms",
        [
            ["journal"],
            ["RunView|plain records"],
            ["diagnosis|why nothing was kept", "summary|one JSON object", "advice|with commands"],
            ["page|one HTML file", "live|while it runs", "Markdown, JSON, JUnit"],
        ],
        [
            ("journal", "RunView"), ("RunView", "summary"), ("RunView", "diagnosis"),
            ("RunView", "advice"), ("diagnosis", "summary"), ("summary", "page"),
            ("summary", "live"), ("summary", "Markdown, JSON, JUnit"), ("advice", "summary"),
        ],
        frozenset({"summary"}),
    ),
    "routing": Picture(
        "Which model for which prompt",
        [
            ["outcomes|k of n per task, model", "prompt"],
            ["embedder", "counts"],
            ["value model|nothing is trained"],
            ["predicted success|mean, interval, coverage"],
            ["rule|target, or dollars", "budget|rollouts that teach"],
            ["model", "group sizes"],
        ],
        [
            ("outcomes", "counts"), ("outcomes", "embedder"), ("prompt", "embedder"),
            ("embedder", "value model"), ("counts", "value model"),
            ("value model", "predicted success"), ("predicted success", "rule"),
            ("predicted success", "budget"), ("rule", "model"), ("budget", "group sizes"),
        ],
        frozenset({"value model"}),
    ),
    "search": Picture(
        "A tree of plans before anything is carried out",
        [
            ["task", "plan memory"],
            ["algorithm|which node next"],
            ["proposer|next actions", "environment|runs an action, undoes it"],
            ["scorer|cost so far, cost to go"],
            ["tree"],
            ["finished path", "RolloutGroup"],
        ],
        [
            ("task", "algorithm"), ("plan memory", "scorer"), ("algorithm", "proposer"),
            ("proposer", "environment"), ("proposer", "scorer"), ("environment", "scorer"),
            ("scorer", "tree"), ("tree", "finished path"), ("tree", "RolloutGroup"),
            ("tree", "algorithm", "next visit"),
        ],
        frozenset({"tree"}),
    ),
    "rl": Picture(
        "One training step",
        [
            ["tasks|curriculum, hints"],
            ["generation|own engine or vLLM"],
            ["verifier"],
            ["groups"],
            ["advantages|credit, rewards"],
            ["rows|packed tokens"],
            ["loss, optimiser"],
            ["weights"],
        ],
        [
            ("tasks", "generation"), ("generation", "verifier"), ("verifier", "groups"),
            ("groups", "advantages"), ("advantages", "rows"), ("rows", "loss, optimiser"),
            ("loss, optimiser", "weights"), ("weights", "generation", "next step"),
        ],
        frozenset({"advantages"}),
    ),
    "escalate": Picture(
        "From a finished run to weights, and a comparison",
        [
            ["finished run|groups, library"],
            ["evidence|what can be learnt"],
            ["plan, cost|before anything is spent"],
            ["distil|library into weights", "GRPO|on the same groups"],
            ["choice|on the gate tasks"],
            ["table|base, library, trained, both"],
        ],
        [
            ("finished run", "evidence"), ("evidence", "plan, cost"), ("plan, cost", "distil"),
            ("plan, cost", "GRPO"), ("distil", "GRPO"), ("distil", "choice"), ("GRPO", "choice"),
            ("choice", "table"),
        ],
        frozenset({"choice"}),
    ),
    "serve": Picture(
        "In front of any agent",
        [
            ["agent|only its base URL changes"],
            ["route|library, caps, keys"],
            ["router|cheapest model that will do"],
            ["upstreams|models", "journal"],
            ["reply|best of several draws"],
            ["feedback"],
            ["candidate|gate, person, live test"],
        ],
        [
            ("agent", "route"), ("route", "router"), ("router", "upstreams"), ("route", "journal"),
            ("upstreams", "reply"), ("reply", "feedback"), ("journal", "feedback"),
            ("feedback", "candidate"), ("candidate", "route", "promoted"),
        ],
        frozenset({"route"}),
    ),
    "hints": Picture(
        "Help in training, never in evaluation",
        [
            ["task"],
            ["bare attempts"],
            ["all failed?"],
            ["hint|prompt, or prefix of a solution"],
            ["helped attempts"],
            ["gradient", "scheduler|more help, or less"],
        ],
        [
            ("task", "bare attempts"), ("bare attempts", "all failed?"), ("all failed?", "hint"),
            ("hint", "helped attempts"), ("helped attempts", "gradient"),
            ("helped attempts", "scheduler"), ("scheduler", "hint", "next visit"),
        ],
        frozenset({"hint"}),
    ),
    "nudges": Picture(
        "Another try for tasks on which everything failed",
        [
            ["failed group"],
            ["help|hint, strategy, draft, example"],
            ["helped group"],
            ["contrast|what made the difference"],
            ["lesson"],
            ["recheck|without help"],
        ],
        [
            ("failed group", "help"), ("help", "helped group"), ("helped group", "contrast"),
            ("failed group", "contrast"), ("contrast", "lesson"), ("lesson", "recheck"),
        ],
        frozenset({"contrast"}),
    ),
}  # fmt: skip

_STYLE = """
svg{font-family:system-ui,sans-serif;color:#24292f}
rect{fill:#f6f8fa;stroke:#8c959f;stroke-width:1.2}
rect.strong{fill:#ddf4ff;stroke:#0969da;stroke-width:1.8}
text{fill:currentColor;font-size:13px;text-anchor:middle}
text.small{font-size:10.5px;fill:#57606a}
path{fill:none;stroke:#8c959f;stroke-width:1.3}
path.head{fill:#8c959f;stroke:none}
@media (prefers-color-scheme: dark){
svg{color:#e6edf3}rect{fill:#161b22;stroke:#6e7681}
rect.strong{fill:#0c2d4a;stroke:#58a6ff}text.small{fill:#9198a1}}
"""


def draw(picture: Picture) -> str:
    """Return a picture as SVG."""
    places = _places(picture)
    rows = max(len(column) for column in picture.columns)
    back = any(places[a[1]][0] <= places[a[0]][0] for a in picture.arrows)
    width = len(picture.columns) * (_WIDTH + _GAP_X) - _GAP_X + 2 * _EDGE
    height = rows * (_HEIGHT + _GAP_Y) - _GAP_Y + 2 * _EDGE + (34 if back else 0)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" role="img" '
        f'aria-label="{escape(picture.title)}">',
        f"<title>{escape(picture.title)}</title><style>{_STYLE}</style>",
        '<defs><marker id="a" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" '
        'markerHeight="7" orient="auto"><path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
    ]
    parts += [_arrow(arrow, places, height) for arrow in picture.arrows]
    parts += [_box(box, places, picture.strong) for column in picture.columns for box in column]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _places(picture: Picture) -> dict[str, tuple[float, float]]:
    """Return each box's upper left corner; a column stands in the middle of the tallest."""
    rows = max(len(column) for column in picture.columns)
    found: dict[str, tuple[float, float]] = {}
    for i, column in enumerate(picture.columns):
        top = _EDGE + (rows - len(column)) * (_HEIGHT + _GAP_Y) / 2
        for j, box in enumerate(column):
            name = box.partition("|")[0]
            found[name] = (_EDGE + i * (_WIDTH + _GAP_X), top + j * (_HEIGHT + _GAP_Y))
    return found


def _box(box: str, places: Mapping[str, tuple[float, float]], strong: frozenset[str]) -> str:
    name, _, small = box.partition("|")
    x, y = places[name]
    mark = ' class="strong"' if name in strong else ""
    middle = x + _WIDTH / 2
    lines = [f'<rect{mark} x="{x:g}" y="{y:g}" width="{_WIDTH}" height="{_HEIGHT}" rx="6"/>']
    down = 21 if small else 30
    lines.append(f'<text x="{middle:g}" y="{y + down:g}">{escape(name)}</text>')
    if small:
        lines.append(f'<text class="small" x="{middle:g}" y="{y + 38:g}">{escape(small)}</text>')
    return "".join(lines)


def _arrow(arrow: tuple[str, ...], places: Mapping[str, tuple[float, float]], height: float) -> str:
    (x1, y1), (x2, y2) = places[arrow[0]], places[arrow[1]]
    words = arrow[2] if len(arrow) > 2 else ""
    if x2 > x1:
        start, end = (x1 + _WIDTH, y1 + _HEIGHT / 2), (x2, y2 + _HEIGHT / 2)
        bend = min(_GAP_X, (end[0] - start[0]) / 2)
        curve = (
            f"M{start[0]:g} {start[1]:g}C{start[0] + bend:g} {start[1]:g} "
            f"{end[0] - bend:g} {end[1]:g} {end[0] - 1:g} {end[1]:g}"
        )
        label = ((start[0] + end[0]) / 2, (start[1] + end[1]) / 2 - 5)
    elif x2 == x1:
        down = y2 > y1
        start = (x1 + _WIDTH / 2, y1 + (_HEIGHT if down else 0))
        end = (x2 + _WIDTH / 2, y2 + (0 if down else _HEIGHT))
        curve = f"M{start[0]:g} {start[1]:g}L{end[0]:g} {end[1] + (-1 if down else 1):g}"
        label = (start[0] + 8, (start[1] + end[1]) / 2)
    else:
        start, end = (x1 + _WIDTH / 2, y1 + _HEIGHT), (x2 + _WIDTH / 2, y2 + _HEIGHT)
        low = height - 12
        curve = (
            f"M{start[0]:g} {start[1]:g}C{start[0]:g} {low + 8:g} {end[0]:g} {low + 8:g} "
            f"{end[0]:g} {end[1] + 1:g}"
        )
        label = ((start[0] + end[0]) / 2, low - 4)
    text = ""
    if words:
        text = f'<text class="small" x="{label[0]:g}" y="{label[1]:g}">{escape(words)}</text>'
    return f'<path d="{curve}" marker-end="url(#a)"/>{text}'


def write(folder: Path = FOLDER) -> None:
    """Write all pictures."""
    folder.mkdir(exist_ok=True)
    for name, picture in PICTURES.items():
        (folder / f"{name}.svg").write_text(draw(picture), encoding="utf-8")


if __name__ == "__main__":
    write()
    print(f"{len(PICTURES)} pictures", file=sys.stderr)
