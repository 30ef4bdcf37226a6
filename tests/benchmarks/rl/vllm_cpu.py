"""`tfgrpo learn` against a real vLLM server, and on vLLM inside its own process, both on the CPU.

    sh tests/vllm/install.sh && python -m tests.benchmarks.rl.vllm_cpu

`rollouts` and `errors` count the learning run against the server and a burst of 128 long replies;
`tokens_per_s` is reply tokens over wall time of that burst; `inprocess_rollouts` are those of a
learning run with `vllm:smollm2-135m` in the environment of vLLM. A rollout that is not graded is an
error.
"""

from __future__ import annotations

import asyncio
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from tests.benchmarks.record import record
from tfgrpo.lm import open_lm
from tfgrpo.lm.local.embedded import embedded_folder
from tfgrpo.policies.chat import ChatPolicy
from tfgrpo.protocols import Limits, Sampling
from tfgrpo.rollout import RolloutGroup, Task
from tfgrpo.sampling import GroupSpec, SampleSettings, sample_groups

ROOT = Path(__file__).parents[3]
BIN = ROOT / ".venv-vllm" / "bin"
COMMAND = "python -m tests.benchmarks.rl.vllm_cpu"
_START_S = 900
_BURST_TASKS, _BURST_DRAWS, _BURST_TOKENS = 16, 8, 64
_SETTINGS = ("policy.sampling.max_tokens=8", "learn.group_size=4", "gate.group_size=2")


def is_installed() -> bool:
    """Tell whether the environment of vLLM is there."""
    return (BIN / "vllm").exists() and (BIN / "python").exists()


def environment() -> dict[str, str]:
    """Return what vLLM needs on a processor without a GPU; nothing is downloaded."""
    return os.environ | {
        "VLLM_TARGET_DEVICE": "cpu",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_NO_USAGE_STATS": "1",
        "HF_HUB_OFFLINE": "1",
        "PATH": f"{BIN}{os.pathsep}{os.environ.get('PATH', '')}",
    }


@contextmanager
def server(log: Path, folder: Path | None = None, *options: str) -> Iterator[str]:
    """Serve the embedded model as `smol`, or a folder under its own path and with vLLM's
    development endpoints; yields the base URL."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [str(BIN / "vllm"), "serve", str(folder or embedded_folder()),
               "--served-model-name", str(folder or "smol"),
               "--host", "127.0.0.1", "--port", str(port), "--max-model-len", "2048",
               "--dtype", "bfloat16", *options]  # fmt: skip
    env = environment() | ({"VLLM_SERVER_DEV_MODE": "1"} if folder else {})
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, env=env, stdout=out, stderr=subprocess.STDOUT, start_new_session=True
        )
    try:
        wait_for(f"http://127.0.0.1:{port}/v1/models", process, log)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.terminate()
        try:
            process.wait(30)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def wait_for(url: str, process: subprocess.Popen[bytes], log: Path) -> None:
    """Wait until a server answers.

    Raises:
        RuntimeError: it ended, or does not within the time for a start.
    """
    until = time.monotonic() + _START_S
    while time.monotonic() < until:
        if process.poll() is not None:
            tail = log.read_text(errors="replace")[-3000:]
            raise RuntimeError(f"vllm ended with {process.returncode} while starting:\n{tail}")
        try:
            with urllib.request.urlopen(url, timeout=2):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(1)
    raise RuntimeError(f"vllm did not answer at {url} within {_START_S} s")


def learn(python: str, folder: Path, spec: str, *settings: str) -> dict[str, Any]:
    """Run `tfgrpo init` and `tfgrpo learn --json` there; returns the printed object."""
    base = [python, "-m", "tfgrpo"]
    options: dict[str, Any] = {"cwd": ROOT, "env": environment(), "text": True}
    subprocess.run([*base, "init", str(folder)], check=True, capture_output=True, **options)
    told = [f'policy.lm="{spec}"', f'run.folder="{folder / "run"}"', *_SETTINGS, *settings]
    sets = [part for one in told for part in ("--set", one)]
    done = subprocess.run(
        [*base, "learn", str(folder / "config.toml"), "--json", *sets],
        capture_output=True,
        check=False,
        **options,
    )
    if done.returncode not in (0, 1):
        raise RuntimeError(f"tfgrpo learn ended with {done.returncode}:\n{done.stderr[-3000:]}")
    result: dict[str, Any] = json.loads(done.stdout)
    return result


def counted(result: dict[str, Any]) -> tuple[int, int]:
    """Return (rollouts, those that were not graded) of a result."""
    outcomes = [pair for stage in result["outcomes"].values() for pair in stage.items()]
    return sum(n for _, n in outcomes), sum(n for name, n in outcomes if name != "graded")


async def burst(spec: str) -> tuple[list[RolloutGroup], float]:
    """Draw long replies at full width; returns the groups and the seconds they took."""
    lm = open_lm(spec, send_seed=False)  # see OpenAILM: seeded chunks end vLLM on a CPU
    policy = ChatPolicy(
        lm,
        sampling=Sampling(1.0, max_tokens=_BURST_TOKENS, extra={"ignore_eos": True}),
        limits=Limits(timeout_s=300.0),
    )
    tasks = [Task(f"story-{i}", f"Tell a story about a {i}-day trip.") for i in range(_BURST_TASKS)]
    draws = GroupSpec(_BURST_DRAWS)
    began = time.monotonic()
    try:
        groups = await sample_groups(
            tasks, policy, None, draws=draws, settings=SampleSettings(concurrency=128, probe=0)
        )
    finally:
        await lm.aclose()
    return groups, time.monotonic() - began


def measure(folder: Path) -> dict[str, Any]:
    """Run all of it and return the figures."""
    with server(folder / "server.log") as url:
        spec = f"{url}#smol"
        rollouts, errors = counted(learn(sys.executable, folder / "server", spec))
        groups, seconds = asyncio.run(burst(spec))
    replies = [r for g in groups for r in g.rollouts]
    for error in sorted({r.error for r in replies if r.error})[:3]:
        print(f"burst: {error}", file=sys.stderr)
    tokens = sum(r.usage.completion_tokens for r in replies)
    inside = learn(
        str(BIN / "python"),
        folder / "inside",
        "vllm:smollm2-135m",
        'policy.options={engine={max_model_len=2048, dtype="bfloat16", enforce_eager=true}}',
    )
    inside_rollouts, inside_errors = counted(inside)
    return {
        "rollouts": rollouts + len(replies),
        "errors": errors + inside_errors + sum(r.outcome != "ungraded" for r in replies),
        "tokens_per_s": round(tokens / seconds, 1),
        "inprocess_rollouts": inside_rollouts,
    }


def main() -> None:
    """Measure and keep the figures."""
    if not is_installed():
        raise SystemExit("there is no .venv-vllm: run `sh tests/vllm/install.sh` first")
    with tempfile.TemporaryDirectory() as name:
        record("vllm_cpu", measure(Path(name)), COMMAND)


if __name__ == "__main__":
    main()
