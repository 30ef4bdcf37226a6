"""The command line against a server that misbehaves: keys, models, signals, secrets."""

from __future__ import annotations

import base64
import json
import os
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.cli.command_line import Ran, cli, command, environment, folder_with
from tests.patience import PATIENCE_S
from tfgrpo.testing import Answer, Call, FaultServer, say, status

pytestmark = pytest.mark.real

CANARY = "CANARY-7f3a9c51d2e84b60"


def digit(call: Call) -> str:
    """A digit by (what is asked, seed)."""
    return str((int(call.key[:6], 16) + (call.seed or 0)) % 3)


def learn(folder: Path, server: FaultServer, *more: str, env: dict[str, str] | None = None) -> Ran:
    """Run `tfgrpo learn` against a server."""
    return cli(folder, *arguments(folder, server, *more), env=env)


def arguments(folder: Path, server: FaultServer, *more: str) -> list[str]:
    """The arguments of `tfgrpo learn` against a server."""
    return ["learn", str(folder / "config.toml"), "--set", f'policy.lm="{server.spec()}"', *more]


KEY = ("--set", 'policy.options={api_key_env="SOME_KEY"}')


def test_a_wrong_key_ends_with_3_after_a_handful_of_calls(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(api_key="right") as server:
        ran = learn(folder, server, *KEY, env={"SOME_KEY": "sk-wrong-0123456789abcdef"})
        assert server.call_count <= 5
    assert ran.code == 3 and "SOME_KEY" in ran.err and "credentials or model" in ran.err, ran
    assert ran.out == "" and len(ran.err.strip().splitlines()) <= 4, ran.err


def test_an_unset_key_ends_with_3_without_a_call(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer() as server:
        ran = learn(folder, server, *KEY)
        assert server.call_count == 0
    assert ran.code == 3 and "SOME_KEY" in ran.err, ran


def test_an_unknown_model_ends_with_3_after_a_handful_of_calls(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(models=("another",)) as server:
        ran = learn(folder, server)
        assert server.call_count <= 5
    assert ran.code == 3 and "scripted" in ran.err, ran


def test_an_exhausted_quota_in_mid_run_ends_with_3_and_keeps_what_was_paid(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    spent = status(429, {"error": {"message": "You exceeded your current quota",
                                   "code": "insufficient_quota"}})  # fmt: skip

    def script(call: Call) -> Answer | str:
        return digit(call) if call.index < 20 else spent

    with FaultServer(script) as server:
        ran = learn(folder, server)
        assert ran.code == 3 and "quota" in ran.err, ran
        assert server.call_count <= 20 + 4
    with FaultServer(digit) as server:
        again = learn(folder, server)
        assert again.code == 2 and "policy.lm" in again.err, "another server is another setting"


def test_nobody_at_the_address_ends_with_5_and_names_it(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer() as server:
        pass
    ran = learn(folder, server, "--set", "run.retry_deadline_s=0.5")
    assert ran.code == 5 and f"127.0.0.1:{server.port}" in ran.err, ran


class Slow:
    """A server's script that takes a moment a call, and a process that learns from it."""

    def __init__(self, folder: Path, server: FaultServer) -> None:
        self.server = server
        self._read = ""
        self.process = subprocess.Popen(
            command(*arguments(folder, server)),
            cwd=folder,
            env=environment(folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def wait_for_calls(self, count: int) -> None:
        until = time.monotonic() + PATIENCE_S
        while self.server.call_count < count:
            assert self.process.poll() is None and time.monotonic() < until
            time.sleep(0.01)

    def wait_for_word(self, word: str) -> None:
        """Read standard error up to a line with this word."""
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self._read += line
            if word in line:
                return

    def end(self) -> Ran:
        out, err = self.process.communicate(timeout=PATIENCE_S)
        return Ran(self.process.returncode, out, self._read + err)


def slowly(seconds: float) -> Callable[[Call], Answer]:
    return lambda call: say(digit(call)).after(seconds)


def paid_twice(server: FaultServer) -> list[tuple[str, int | None]]:
    asked = Counter((call.key, call.seed) for call in server.calls)
    return [draw for draw, n in asked.items() if n > 1]


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_one_signal_finishes_what_is_in_flight_and_the_same_command_goes_on(
    tmp_path: Path, number: int, code: int
) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(slowly(0.15)) as server:
        run = Slow(folder, server)
        run.wait_for_calls(16)
        run.process.send_signal(number)
        ran = run.end()
        assert ran.code == code and "go on" in ran.err and "Traceback" not in ran.err, ran
        assert "finish and are kept" in ran.err and ran.out == ""
        assert server.dropped == 0 and server.call_count <= 16 + 2 * 4
        after = learn(folder, server, "--json")
        assert after.code in (0, 1) and not paid_twice(server)
        if number == signal.SIGTERM:
            return
    (tmp_path / "other").mkdir()
    with FaultServer(digit) as other:
        whole = learn(folder_with(tmp_path / "other"), other, "--json")
        assert other.call_count == server.call_count
    ours, theirs = json.loads(after.out), json.loads(whole.out)
    assert ours["verdict"] == theirs["verdict"] and ours["outcomes"] == theirs["outcomes"]


def test_a_second_ctrl_c_leaves_at_once_and_the_same_command_goes_on(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    pace = [3600.0]

    def script(call: Call) -> Answer:
        return say(digit(call)).after(pace[0] if call.index >= 4 else 0.02)

    with FaultServer(script) as server:
        run = Slow(folder, server)
        run.wait_for_calls(6)
        run.process.send_signal(signal.SIGINT)
        run.wait_for_word("stopping")
        assert run.process.poll() is None, "the first one waits for calls in flight"
        run.process.send_signal(signal.SIGINT)
        ran = run.end()  # long before any call in flight is answered
        assert ran.code == 130
        assert "left at once" in ran.err and "Traceback" not in ran.err, ran
        pace[0] = 0.0
        after = learn(folder, server, "--json")
        assert after.code in (0, 1), after
        assert len(paid_twice(server)) <= 4, "at most what was in flight"


def test_kill_9_costs_at_most_the_calls_in_flight(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(slowly(0.05)) as server:
        for calls in (6, 30):
            run = Slow(folder, server)
            run.wait_for_calls(calls)
            run.process.kill()
            run.process.communicate(timeout=PATIENCE_S)
        after = learn(folder, server, "--json")
        assert after.code in (0, 1) and len(paid_twice(server)) <= 2 * 4, after
        finished = json.loads(after.out)
    assert finished["outcomes"]["practice"] == {"graded": 2 * 24}, "two epochs"


def echoing(call: Call) -> Answer:
    """Echo the key in the body, a header and the status line's neighbourhood."""
    key = call.headers.get("authorization", "")
    said = {"error": {"message": f"no model for {key} at /v1?key={key}", "param": key}}
    return status(404, said, x_echo=key)


def chatty(call: Call) -> Answer:
    """A good reply that echoes the key."""
    key = call.headers.get("authorization", "")
    return say(f"{digit(call)} {key}", reasoning=f"I was sent {key}")


def pieces(secret: str) -> set[bytes]:
    """Every six-character window of a secret, plain, quoted and in base64."""
    forms = {secret, quote(secret, safe=""), quote(secret.replace("-", "%2D"))}
    found = {form[i : i + 6].encode() for form in forms for i in range(len(form) - 5)}
    coded = base64.b64encode(secret.encode()).decode().rstrip("=")
    return found | {coded[i : i + 12].encode() for i in range(len(coded) - 11)}


@pytest.mark.parametrize("script", [echoing, chatty], ids=["error", "reply"])
@pytest.mark.parametrize("debug", [False, True], ids=["plain", "debug"])
def test_t1_no_piece_of_a_key_is_in_the_run_folder_or_the_output(
    tmp_path: Path, script: Callable[[Call], Answer], debug: bool
) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(script) as server:
        words = [*(["--debug"] if debug else []), *arguments(folder, server, *KEY)]
        ran = cli(folder, *words, env={"SOME_KEY": CANARY})
        assert ran.code == (3 if script is echoing else 1), ran
        assert ("Traceback" in ran.err) == (debug and script is echoing)
        assert server.calls[0].headers["authorization"] == f"Bearer {CANARY}"
    runs = [ran]
    if script is chatty and debug:
        for words in (
            ["config", "show", str(folder / "config.toml")],
            ["report", str(folder / "run")],
            ["export", str(folder / "run"), str(folder / "groups.jsonl")],
        ):
            runs.append(cli(folder, *words, env={"SOME_KEY": CANARY}))
        assert [r.code for r in runs[1:]] == [0, 0, 0], runs
    said = [r.out + r.err for r in runs]
    written = [p.read_bytes() for p in folder.rglob("*") if p.is_file()]
    haystack = b"\n".join([*(s.encode() for s in said), *written])
    assert [p for p in sorted(pieces(CANARY)) if p in haystack] == []
    assert any(p.stat().st_size for p in (folder / "run").iterdir())


def test_the_run_folder_is_for_its_owner_only(tmp_path: Path) -> None:
    folder = folder_with(tmp_path)
    with FaultServer(digit) as server:
        learn(folder, server)
    run = folder / "run"
    assert oct(run.stat().st_mode & 0o777) == "0o700" and os.listdir(run)
