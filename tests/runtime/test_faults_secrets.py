"""Secrets leave through no sink, and no reader of foreign text takes quadratic steps.

How the readers' time grows is measured by `tests.benchmarks.faults.linear_readers`.
"""

from __future__ import annotations

import base64
import json
import string
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.cli.command_line import folder_with, here
from tfgrpo.lm import open_lm
from tfgrpo.lm.failures import error_in_body, excerpt, failure_kind
from tfgrpo.lm.finish_words import finish_word
from tfgrpo.lm.openai import OpenAILM
from tfgrpo.lm.openai_reply import _json_texts
from tfgrpo.lm.parameters import Parameters
from tfgrpo.lm.stream import EventStream
from tfgrpo.lm.wire import loads
from tfgrpo.runtime.files import write_whole
from tfgrpo.runtime.redaction import (
    MASK,
    forget_secrets,
    redact,
    redact_known,
    register,
    register_headers,
)
from tfgrpo.runtime.terminal import markup, one_line, printable
from tfgrpo.runtime.texts.text_lines import numbered_lines
from tfgrpo.testing import FaultServer, say

CANARY = "CANARY7f3a9c51d2e84b60qZ"


@pytest.fixture(autouse=True)
def clean() -> Iterator[None]:
    forget_secrets()
    yield
    forget_secrets()


def forms(key: str) -> dict[str, str]:
    raw = key.encode()
    return {
        "whole": key,
        "first half": key[: len(key) // 2],
        "second half": key[len(key) // 2 :],
        "hex": raw.hex(),
        "HEX": raw.hex().upper(),
        "base64": base64.b64encode(raw).decode(),
        "basic": base64.b64encode(b"user:" + raw).decode(),
        "urlsafe": base64.urlsafe_b64encode(b"x" + raw).decode(),
        "quoted": quote(key, safe=""),
    }


@pytest.mark.parametrize("name", sorted(forms(CANARY)))
def test_data_keeps_no_half_of_a_secret_in_any_encoding(name: str) -> None:
    register(CANARY)
    shown = forms(CANARY)[name]
    text = json.dumps({"a": f"before {shown} after", "b": [shown, "é\n"]})
    clean = redact_known(text)
    row = json.loads(clean)
    assert shown not in clean and MASK in clean
    assert row["a"].startswith("before ") and row["a"].endswith(" after") and row["b"][1] == "é\n"


@given(
    key=st.text(string.ascii_letters + string.digits + "-_", min_size=16, max_size=60),
    before=st.text(max_size=20),
    after=st.text(max_size=20),
    cut=st.integers(0, 30),
)
def test_no_half_of_any_key_survives_in_data(key: str, before: str, after: str, cut: int) -> None:
    forget_secrets()
    register(key)
    half = (len(key) + 1) // 2
    at = min(cut, len(key) - half)
    clean = redact_known(json.dumps([before, key[at : at + half], after]))
    assert key[at : at + half] not in json.loads(clean)[1]
    rest = json.loads(redact_known(json.dumps([before, after])))
    if not any(key[i : i + half] in t for t in (before, after) for i in range(len(key) - half + 1)):
        assert rest == [before, after]


def test_ordinary_words_of_data_stay_though_a_secret_holds_them() -> None:
    register("correct-horse-battery-staple-99")
    text = "the correct horse has a battery and a staple"
    assert redact_known(text) == text


@pytest.mark.parametrize(
    ("headers", "query"),
    [
        ({"Authorization": f"Bearer {CANARY}"}, ""),
        ({"x-api-key": CANARY}, ""),
        ({"Cookie": CANARY}, ""),
        ({}, f"?key={CANARY}"),
        ({}, f"?access_token={CANARY}"),
    ],
)
def test_keys_in_headers_and_queries_are_registered(headers: dict[str, str], query: str) -> None:
    OpenAILM("m", base_url=f"http://127.0.0.1:9/v1{query}", headers=headers)
    assert CANARY not in redact(f"echo {CANARY}") and CANARY not in redact_known(CANARY)


def test_what_names_no_key_is_not_registered() -> None:
    register_headers({"user-agent": "a-long-harmless-value", "accept": "application/json"})
    assert redact_known("a-long-harmless-value") == "a-long-harmless-value"


def test_a_key_that_is_part_of_an_address_and_of_every_answer_is_in_no_sink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MY_KEY", CANARY)
    half = CANARY[: len(CANARY) // 2]
    echoes = " ".join(forms(CANARY).values())

    def script(call: Any) -> Any:
        return say(f"{echoes} {call.index % 3}", model=f"model-{CANARY}", reasoning=echoes)

    with FaultServer(script) as server:
        spec = f"http://127.0.0.1:{server.port}/{CANARY}/v1?api_key_env=MY_KEY#m-{CANARY}"
        folder = folder_with(tmp_path, f'[policy]\nlm = "{spec}"')
        ran = [
            here(capsys, "models", "--check", spec),
            here(capsys, "learn", str(folder / "config.toml")),
            here(capsys, "report", str(folder / "run")),
            here(capsys, "report", str(folder / "run"), "--format", "md"),
            here(capsys, "export", str(folder / "run"), str(folder / "out.jsonl")),
            here(capsys, "runs", "list", str(folder)),
        ]
    assert ran[0].code == 0, ran[0]
    sinks = {f"{i} {n}": getattr(r, n) for i, r in enumerate(ran) for n in ("out", "err")}
    for path in folder.rglob("*"):
        if path.is_file() and path.name != "config.toml":
            sinks[path.name] = path.read_bytes().decode("latin-1")
    for name, text in sinks.items():
        for form, shown in forms(CANARY).items():
            assert shown not in text, f"{form} in {name}"
        assert half not in text, name


# --- readers of foreign text ----------------------------------------------------------------------


def stream(text: str) -> None:
    events = EventStream()
    data = text.encode("utf-8", "surrogatepass")
    for at in range(0, len(data), 7):
        events.feed(data[at : at + 7])
    events.close()


def known(text: str) -> None:
    redact_known(text)
    redact(text)


def quiet_loads(text: str) -> None:
    try:
        loads(text.encode("utf-8", "surrogatepass"))
    except (ValueError, RecursionError):
        return


READERS: dict[str, Callable[[str], Any]] = {
    "redact": known,
    "loads": quiet_loads,
    "stream": stream,
    "event": _json_texts,
    "excerpt": excerpt,
    "failure_kind": lambda t: failure_kind(400, t[:4000]),
    "error_in_body": lambda t: error_in_body({"message": t}),
    "parameters": lambda t: Parameters().learn(
        {"temperature": 1}, t.encode("utf-8", "replace"), {}
    ),
    "finish": finish_word,
    "printable": printable,
    "one_line": one_line,
    "markup": markup,
    "lines": lambda t: list(numbered_lines(t)),
}
UNITS = (
    "\n", " \n", "\\", "[", "]", "{", '"', '\\"', '"\\', "a", "eyJ-", "eyJaaaaaaaa.", "sk-",
    "bearer ",
    "://a:", "api_key ", "api_key=", "password", "[[a", "\\[", "data:", "data: {\n", "\r", "\r\n",
    "AIza", "use ", "quota ", "model ", "exceeds the max ", "\u2028", "\x1b", "<think>", "CANARY7f",
    "Basic ", "=", "'", "%3D", "://",
)  # fmt: skip


@pytest.mark.parametrize("name", sorted(READERS))
def test_reading_takes_steps_in_proportion_to_the_text(
    name: str, steps_of: Callable[..., int]
) -> None:
    """Four times the text may take five times the steps; a quadratic reader takes sixteen."""
    register(CANARY)
    for unit in UNITS:
        for head in ("", '{"a": "'):
            small, large = (head + unit * (size // len(unit)) for size in (2_000, 8_000))
            few, many = steps_of(READERS[name], small), steps_of(READERS[name], large)
            assert many <= 5 * few + 100, (unit, head)


@pytest.mark.parametrize("read", [redact, redact_known, printable, one_line])
def test_what_was_made_safe_stays_as_it_is(read: Callable[[str], str]) -> None:
    register(CANARY)
    for unit in UNITS:
        safe = read(unit * (20_000 // len(unit)))
        assert read(safe) == safe, unit


def test_written_files_hold_no_secret(tmp_path: Path) -> None:
    register(CANARY)
    write_whole(tmp_path / "page.html", f"a {CANARY} b")
    assert (tmp_path / "page.html").read_text() == f"a {MASK} b"


def test_a_page_in_a_narrow_code_page_is_escaped_and_not_a_failure(tmp_path: Path) -> None:
    import subprocess
    import sys

    code = (
        "import sys; from tfgrpo.runtime.output import safe_output\n"
        "with safe_output(): print('± é ✓')"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False,
        env={"PYTHONIOENCODING": "ascii", "PYTHONPATH": str(Path(__file__).parents[2])},
    )  # fmt: skip
    assert done.returncode == 0 and "\\xb1" in done.stdout, done.stderr


def test_a_server_error_is_told_once_and_unescaped() -> None:
    body = '{"error": {"message": "Incorrect \\"key\\" é: try again"}}'
    assert excerpt(body) == 'Incorrect "key" é: try again'
    assert excerpt('{"detail": [{"msg": "field required"}]}') == "field required"
    assert excerpt('{"error": "plain"}') == "plain" and excerpt("<html>x") == "<html>x"
    with FaultServer(say("x"), api_key="another-key-0123") as server:
        assert open_lm(server.spec()).model_id == server.spec()
