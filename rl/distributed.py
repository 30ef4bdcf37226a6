"""Several processes, one a GPU: every process samples and trains on its share of a step's tasks.

Started by `torchrun`; with one process every function here is the identity. Each process holds all
weights and gradients are averaged once an update, or FSDP2 shards the trained weights over a host's
processes (`model.shard`): float32 shards, gathered layer by layer in bfloat16, while the generator
has a whole copy in bfloat16 that is refreshed after each update. Over several hosts each host holds
all shards, so only gradients travel between hosts, once an update. Task ids fix the seeds, so what
is sampled does not depend on how many processes there are.

Does not know losses or tasks. Source: `torch.distributed.fsdp.fully_shard`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, NoReturn

import torch
from torch import Tensor, nn

from tfgrpo.runtime.user_code import end_process

if TYPE_CHECKING:
    from tfgrpo.rl.model.decoder import Decoder

_GROUP: ContextVar[Any] = ContextVar("group", default=None)
"""The group that values are gathered over; None is that of `start`."""


def world() -> tuple[int, int]:
    """Return (this process's number, number of processes)."""
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return 0, 1
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def start() -> tuple[int, int]:
    """Join the group that `torchrun` describes, if it started us; return `world()`."""
    if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.distributed.is_initialized():
        on_cuda = torch.cuda.is_available()
        if on_cuda:
            torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", "0")))
        torch.distributed.init_process_group("nccl" if on_cuda else "gloo")
    return world()


def finish() -> None:
    """Leave the group that `start` joined; an engine's own group of one process is left to it."""
    if world()[1] > 1:
        torch.distributed.destroy_process_group()


def end() -> NoReturn:
    """Finish one of several processes with exit code 0; the last thing that it does.

    The group's threads outlive `finish`, since torch's caches of meshes keep it, and may only then
    let go of their last tensor (pytorch issue 190489).
    """
    end_process(0)


def hosts() -> int:
    """Return how many hosts `torchrun` started processes on, the same number on each."""
    if world()[1] == 1:
        return 1
    return world()[1] // int(os.environ.get("LOCAL_WORLD_SIZE", world()[1]))


def further_group() -> Any:
    """Return another group of all processes, which all must ask for; None with one process."""
    return torch.distributed.new_group(backend="gloo") if world()[1] > 1 else None


@contextmanager
def gathering_over(group: Any) -> Iterator[None]:
    """Gather values over a group of a thread's own, so that they never meet another thread's."""
    token = _GROUP.set(group)
    try:
        yield
    finally:
        _GROUP.reset(token)


def sum_over_ranks(value: Tensor) -> Tensor:
    """Return the sum of a tensor over all processes."""
    if world()[1] == 1:
        return value
    total = value.clone()
    torch.distributed.all_reduce(total)
    return total


def average(tensors: Iterable[Tensor]) -> None:
    """Replace tensors by their means over all processes, in place."""
    processes = world()[1]
    for tensor in tensors if processes > 1 else ():
        torch.distributed.all_reduce(tensor)
        tensor.div_(processes)


def is_sharded(module: nn.Module) -> bool:
    """True where `shard` has cut the module's parameters."""
    return any(hasattr(p, "to_local") for p in module.parameters())


def sum_over_shards(value: Tensor) -> Tensor:
    """Return the sum over the shards of one copy of the weights, of what every copy has equal."""
    return sum_over_ranks(value) / hosts()


def most_over_ranks(value: int) -> int:
    """Return the largest value that any process gives."""
    return max(int(v) for v in gather_objects(value))


def gather_objects(value: Any) -> list[Any]:
    """Return every process's value, in order of process number."""
    if world()[1] == 1:
        return [value]
    found: list[Any] = [None] * world()[1]
    torch.distributed.all_gather_object(found, value, group=_GROUP.get())
    return found


def local(tensor: Tensor) -> Tensor:
    """Return this process's shard of a distributed tensor, or the tensor itself."""
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def whole(tensor: Tensor) -> Tensor:
    """Return the full value of a distributed tensor; all processes must call it."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def shard(decoder: Decoder) -> Decoder:
    """Shard a float32 decoder over a host's processes; gradients are averaged over all."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    on_cuda = decoder.embed.is_cuda
    policy = MixedPrecisionPolicy(
        param_dtype=torch.bfloat16 if on_cuda else None, reduce_dtype=torch.float32
    )
    n, kind = hosts(), "cuda" if on_cuda else "cpu"
    mesh = None  # all processes
    if n > 1:
        names = ("replicate", "shard")
        mesh = init_device_mesh(kind, (n, world()[1] // n), mesh_dim_names=names)
    for layer in decoder.layers:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(decoder, mesh=mesh, mp_policy=policy)
    return decoder


def refresh(target: Decoder, source: Decoder) -> None:
    """Copy a sharded decoder's weights into a whole one; all processes must call it."""
    own = dict(target.named_parameters())
    with torch.no_grad():
        for name, parameter in source.named_parameters():
            own[name].copy_(whole(parameter.detach()))
