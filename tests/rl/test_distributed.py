"""Several processes train what one process trains, each with all weights or with shards: on the
CPU, on two GPUs."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.patience import PATIENCE_S
from tests.rl.beside import AHEAD
from tests.rl.tiny import big_parts
from tfgrpo.rl.model.decoder import hf_views
from tfgrpo.rl.update.updater import like

ROOT = Path(__file__).parents[2]


def launch(
    folder: Path, processes: int, *, hosts: int = 1, on_gpu: bool = False, **sections: object
) -> None:
    """Train in processes of a host; several hosts are agents of torchrun on this machine."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "tests.rl.fsdp_worker", str(folder), json.dumps(sections)]
    if processes > 1 or hosts > 1:
        command[1:3] = ["-m", "torch.distributed.run", *_meeting(hosts)]
        command[-2:-2] = [f"--nproc-per-node={processes}", "-m", "tests.rl.fsdp_worker"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    if not on_gpu:
        environment["CUDA_VISIBLE_DEVICES"] = ""
    agents = []
    for host in range(hosts):
        with (folder / f"host{host}.log").open("w") as said:
            agents.append(
                subprocess.Popen(command, cwd=ROOT, env=environment, stdout=said, stderr=said)
            )
    try:
        codes = [agent.wait(PATIENCE_S) for agent in agents]
    finally:
        for agent in agents:
            agent.kill()
    assert not any(codes), [(folder / f"host{h}.log").read_text()[-3000:] for h in range(hosts)]


def _meeting(hosts: int) -> list[str]:
    if hosts == 1:
        return ["--standalone"]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    place = [f"--rdzv-endpoint=127.0.0.1:{port}", f"--rdzv-id={port}"]
    return [f"--nnodes={hosts}", "--rdzv-backend=c10d", "--local-addr=127.0.0.1", *place]


def read(folder: Path, name: str = "weights"):
    from safetensors.torch import load_file

    weights = load_file(folder / f"{name}.safetensors")
    return weights, json.loads((folder / "report.json").read_text())


@pytest.mark.real
@pytest.mark.parametrize("shard", [False, True])
def test_two_processes_sample_train_and_resume_like_one(tmp_path, shard: bool) -> None:
    launch(tmp_path / "one", 1)
    launch(tmp_path / "two", 2, model={"shard": shard})
    one, alone = read(tmp_path / "one")
    two, together = read(tmp_path / "two")
    assert alone["ids"][0] == together["ids"][0]
    assert together["told"][0] == pytest.approx(alone["told"][0], rel=1e-4, abs=1e-6)
    assert together["resumed_bit_equal"] and alone["resumed_bit_equal"]
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.real
def test_curricula_and_estimators_over_the_batch_mean_the_same_on_two_processes(tmp_path) -> None:
    """More rounds than one, a profiling pass, an estimator that looks at the whole batch, and
    activations that are made again."""
    sections = {
        "curriculum": {"max_resample_rounds": 2, "profile": 1, "allocate": "", "rest_epochs": 1},
        "rewards": {"names": ["unlikeliness"]},
        "credit": {"name": "top_entropy"},
        "model": {"checkpoint_activations": True, "shard": True},
    }
    launch(tmp_path / "one", 1, **sections)
    launch(tmp_path / "two", 2, **sections)
    one, alone = read(tmp_path / "one")
    two, together = read(tmp_path / "two")
    assert alone["ids"][0] == together["ids"][0]
    assert together["resumed_bit_equal"] and alone["resumed_bit_equal"]
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.real
def test_two_processes_that_sample_ahead_train_and_resume_like_one(tmp_path) -> None:
    """What the rollouts gather never meets what the update beside them gathers: curricula and
    estimators ask the other process in both."""
    sections = {
        "engine": AHEAD,
        "curriculum": {"max_resample_rounds": 2, "rest_epochs": 1},
        "credit": {"name": "top_entropy"},
        "optimiser": {"steps": 2, "lr": 1e-3, "micro_batch_tokens": 40, "updates_per_epoch": 2},
    }
    launch(tmp_path / "one", 1, **sections)
    launch(tmp_path / "two", 2, **sections)
    one, alone = read(tmp_path / "one")
    two, together = read(tmp_path / "two")
    assert alone["ids"] == together["ids"]
    assert together["resumed_bit_equal"] and alone["resumed_bit_equal"]
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.real
def test_adapters_are_trained_by_two_processes_as_by_one(tmp_path) -> None:
    """An update a group: it is the same group's, and the other process has no rows of it."""
    sections = {
        "model": {"lora_rank": 2},
        "rollout": {"tasks_per_step": 3},
        "optimiser": {"steps": 2, "lr": 1e-2, "updates_per_epoch": 3, "micro_batch_tokens": 40},
    }
    launch(tmp_path / "one", 1, **sections)
    launch(tmp_path / "two", 2, **sections)
    one, alone = read(tmp_path / "one", "masters")
    two, together = read(tmp_path / "two", "masters")
    assert any("lora_B" in name and weight.any() for name, weight in one.items())
    assert alone["ids"][0] == together["ids"][0]
    assert together["resumed_bit_equal"]
    for name, weight in one.items():
        torch.testing.assert_close(two[name], weight, rtol=1e-3, atol=1e-5, msg=name)


@pytest.mark.real
@pytest.mark.parametrize("shard", [False, True])
def test_two_hosts_train_and_resume_like_one_process(tmp_path, shard: bool) -> None:
    """Two hosts of two processes: each host has all shards, so the norm counts one copy."""
    launch(tmp_path / "one", 1)
    launch(tmp_path / "hosts", 2, hosts=2, model={"shard": shard})
    one, alone = read(tmp_path / "one")
    both, together = read(tmp_path / "hosts")
    assert alone["ids"][0] == together["ids"][0]
    assert together["resumed_bit_equal"]
    assert together["norms"] == pytest.approx(alone["norms"], rel=1e-4)
    for name, weight in one.items():
        torch.testing.assert_close(both[name], weight, rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
@pytest.mark.parametrize("shard", [False, True])
def test_two_gpus_sample_train_and_resume_like_one(tmp_path, shard: bool) -> None:
    """Over NCCL. AdamW's first steps are the gradient's signs, so single weights may differ by
    rounding where gradients are small; the norms tell a wrong scale, the direction the rest."""
    sections = {
        "rollout": {"tasks_per_step": 4, "max_tokens": 40, "max_rows": 16, "fixed_rows": True},
        "optimiser": {"steps": 2, "lr": 1e-3, "micro_batch_tokens": 256},
    }
    launch(tmp_path / "one", 1, on_gpu=True, **sections)
    launch(tmp_path / "two", 2, on_gpu=True, model={"shard": shard}, **sections)
    one, alone = read(tmp_path / "one", "masters")
    two, together = read(tmp_path / "two", "masters")
    assert alone["ids"][0] == together["ids"][0]
    assert together["resumed_bit_equal"] and alone["resumed_bit_equal"]
    assert together["norms"] == pytest.approx(alone["norms"], rel=0.05)
    for name, start in big_parts().decoder.named_parameters():
        moved, beside = ((w[name] - start.detach().cpu()).flatten() for w in (one, two))
        assert torch.cosine_similarity(moved, beside, dim=0) > 0.8, name
    if not shard:  # a weight is the upper half of its master
        return
    sampling, _ = read(tmp_path / "two")
    trained = like(big_parts().decoder, torch.bfloat16)
    trained.load_state_dict(two)
    for name, view in hf_views(trained).items():
        assert torch.equal(sampling[name], view.cpu()), name


THREADED = """
import atexit, sys, threading
import torch
from tfgrpo.rl import distributed

def busy():  # asks for the interpreter's lock again and again, from inside torch
    a = torch.randn(100)
    while True:
        a + a

class Leftover:
    def __del__(self):
        print("taken apart", flush=True)

left = Leftover()
atexit.register(lambda: print("hook ran"))
for _ in range(4):
    threading.Thread(target=busy, daemon=True).start()
print("no newline at the end", end="")
distributed.end()
"""


@pytest.mark.real
def test_a_process_that_ends_while_threads_use_torch_is_not_aborted() -> None:
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", THREADED],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=PATIENCE_S,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        assert done.stdout == "no newline at the endhook ran\n"
