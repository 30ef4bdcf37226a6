"""Running a rival's script in the rival's own environment.

The script gets its job on standard input and prints what it learnt as its last line. A rival that
is not installed, fails or runs over time says so in the table. Does not know rewards or tokens.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tests.benchmarks.head_to_head.methods import ACTOR, Learnt, Setup, Unavailable
from tests.benchmarks.head_to_head.server import MODEL
from tfgrpo.rollout import Task

ROOT = Path(__file__).parents[3]
SCRIPTS = Path(__file__).parent / "peers"
EMPTY: Mapping[str, object] = MappingProxyType({})
GRACE_S = 180.0
"""Time for a rival to end after its deadline, before it is stopped."""


async def run_rival(name: str, script: str, setup: Setup, url: str) -> Learnt:
    """Run `script` with the interpreter of environment `name`.

    Raises:
        Unavailable: not installed, failed, or stopped for time.
    """
    job = {
        "url": url,
        "model": MODEL,
        "seed": setup.seed,
        "system": setup.family.system,
        "train": [_row(t) for t in setup.split.train],
        "choose": [_row(t) for t in setup.split.choose],
        "budget_tokens": setup.budget_tokens,
        "deadline_s": setup.deadline_s,
        "temperature": ACTOR.temperature,
        "max_tokens": ACTOR.max_tokens,
    }
    return Learnt.from_row(await run_script(name, script, job, setup.extra))


async def run_script(
    name: str, script: str, job: Mapping[str, Any], extra: Mapping[str, object] = EMPTY
) -> dict[str, Any]:
    """Run a rival's script on a job (`peers.common.Job`) and return what it printed.

    Raises:
        Unavailable: not installed, failed, or stopped for time.
    """
    python = ROOT / ".venv-peers" / name / "bin" / "python"
    if not python.exists():
        raise Unavailable("not installed: sh tests/benchmarks/head_to_head/install.sh")
    with tempfile.TemporaryDirectory(prefix="rival-") as home:
        process = await asyncio.create_subprocess_exec(
            str(python),
            str(SCRIPTS / script),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.PIPE,
            env=_environment(home, extra),
            cwd=home,
        )
        try:
            async with asyncio.timeout(job["deadline_s"] + GRACE_S):
                out, err = await process.communicate(json.dumps(job).encode())
        except TimeoutError:
            raise Unavailable(f"did not end {GRACE_S:.0f} s after its time limit") from None
        finally:
            if process.returncode is None:
                process.kill()
                await process.wait()
    if process.returncode:
        lines = err.decode(errors="replace").strip().splitlines()
        print(err.decode(errors="replace")[-3000:], file=sys.stderr)
        raise Unavailable(f"failed: {lines[-1][:160] if lines else process.returncode}")
    row: dict[str, Any] = json.loads(out.decode().strip().splitlines()[-1])
    return row


def _row(task: Task) -> dict[str, str]:
    return {"task_id": task.task_id, "prompt": task.text, "reference": str(task.reference)}


def _environment(home: str, extra: Mapping[str, object]) -> dict[str, str]:
    """An empty home, no keys, no network beyond this machine, caches thrown away."""
    return {
        "PATH": os.environ.get("PATH", ""),
        "HOME": home,
        "DSPY_CACHEDIR": f"{home}/cache",
        "LITELLM_LOCAL_MODEL_COST_MAP": "True",
        "NO_PROXY": "127.0.0.1",
        "OMP_NUM_THREADS": "1",
        **{k: str(v) for k, v in extra.items()},
    }
