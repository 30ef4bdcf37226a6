"""What a cell gives up before it sees foreign code: other processes, files outside, memory tricks.

Sent to a cell as source and run there, so it imports only the standard library. Landlock (Linux
5.13 and later) leaves reading of the interpreter and writing of the cell's own folder; it also
hides other processes' memory, descriptors and environment, and from 6.12 on signals do not leave
the cell. A seccomp filter forbids processes of its own (threads stay), signals to others, and
memory that no limit counts (memfd, System V shared memory). Each part is best effort: an older
kernel leaves it out, and `process` is no security boundary with or without them.

Does not know Python code or rewards. Source: landlock(7), seccomp(2); own.
"""

import ctypes
import os
import platform
import struct

_LIBC = ctypes.CDLL(None, use_errno=True)
_PRCTL_NO_NEW_PRIVS, _PRCTL_SECCOMP = 38, 22

_READ, _ALL_V1 = 0b1101, (1 << 13) - 1
"""execute, read a file, read a folder; every right of the first version."""
_FILE_RIGHTS = 0b111
_NET_RIGHTS, _SCOPES = 0b11, 0b11
"""bind and connect by TCP; abstract sockets and signals."""

_CALLS = {
    # name: (number on x86_64, on aarch64)
    "kill": (62, 129), "tkill": (200, 130), "tgkill": (234, 131), "rt_sigqueueinfo": (129, 138),
    "rt_tgsigqueueinfo": (297, 240), "pidfd_send_signal": (424, 424), "pidfd_open": (434, 434),
    "pidfd_getfd": (438, 438), "ptrace": (101, 117), "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271), "memfd_create": (319, 279), "memfd_secret": (447, 447),
    "shmget": (29, 194), "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180),
    "setns": (308, 268), "unshare": (272, 97), "io_uring_setup": (425, 425),
    "prlimit64": (302, 261), "userfaultfd": (323, 282), "perf_event_open": (298, 241),
    "bpf": (321, 280), "setpriority": (141, 140), "fork": (57, -1), "vfork": (58, -1),
    "clone": (56, 220), "clone3": (435, 435),
}  # fmt: skip
_OWN_PID_ONLY = ("kill", "tgkill", "rt_sigqueueinfo", "rt_tgsigqueueinfo")
_EPERM, _ENOSYS = 0x00050001, 0x00050026
_ALLOW, _CLONE_THREAD = 0x7FFF0000, 0x00010000


def confine(readable: list[str], folder: str) -> dict[str, bool]:
    """Give up what can be given up; return which parts hold."""
    _LIBC.prctl(_PRCTL_NO_NEW_PRIVS, 1, 0, 0, 0)
    return {"files": _landlock(readable, folder), "calls": _seccomp()}


def _landlock(readable: list[str], folder: str) -> bool:
    version = _LIBC.syscall(444, None, 0, 1)
    if version < 1:
        return False
    rights = _ALL_V1
    rights |= (1 << 13) if version >= 2 else 0  # link between folders
    rights |= (1 << 14) if version >= 3 else 0  # truncate
    net, scopes = (_NET_RIGHTS if version >= 4 else 0), (_SCOPES if version >= 6 else 0)
    attributes = struct.pack("QQQ", rights, net, scopes)
    size = 8 if version < 4 else 16 if version < 6 else 24
    ruleset = _LIBC.syscall(444, attributes, size, 0)
    if ruleset < 0:
        return False
    for path in readable:
        _allow(ruleset, path, _READ)
    for name in ("null", "zero", "urandom", "random"):
        _allow(ruleset, "/dev/" + name, 0b110)
    _allow(ruleset, folder, rights)
    held = _LIBC.syscall(446, ruleset, 0) == 0
    os.close(ruleset)
    return bool(held)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        place = os.open(path, 0o10000000 | os.O_CLOEXEC)  # O_PATH
    except OSError:
        return  # not there: nothing to allow
    if not os.path.isdir(path):
        rights &= _FILE_RIGHTS
    _LIBC.syscall(445, ruleset, 1, struct.pack("=Qi", rights, place), 0)
    os.close(place)


def _seccomp() -> bool:
    machine = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}.get(platform.machine())
    if machine is None:
        return False
    column, architecture = machine
    number = {name: numbers[column] for name, numbers in _CALLS.items()}
    program = [_load(4), _unless(architecture, _ALLOW), _load(0)]
    for name, call in number.items():
        if name in (*_OWN_PID_ONLY, "prlimit64", "clone", "clone3") or call < 0:
            continue
        program.append(_if(call, _EPERM))
    program.append(_if(number["clone3"], _ENOSYS))  # libc falls back to clone, whose flags are seen
    flat = b"".join(program)
    me = os.getpid()
    for name in (*_OWN_PID_ONLY, "prlimit64"):
        wanted = 0 if name == "prlimit64" else me
        # not this call: on; the low half of the first argument is the wanted one: on; else refused
        flat += _step(0x15, 0, 4, number[name]) + _load(16) + _step(0x15, 1, 0, wanted)
        flat += _step(0x06, 0, 0, _EPERM) + _load(0)
    flat += _step(0x15, 0, 3, number["clone"]) + _load(16)
    flat += _step(0x45, 1, 0, _CLONE_THREAD) + _step(0x06, 0, 0, _EPERM)
    flat += _step(0x06, 0, 0, _ALLOW)
    buffer = ctypes.create_string_buffer(flat, len(flat))
    header = struct.pack("HxxxxxxP", len(flat) // 8, ctypes.addressof(buffer))
    return bool(_LIBC.prctl(_PRCTL_SECCOMP, 2, header, 0, 0) == 0)


def _step(code: int, then: int, otherwise: int, value: int) -> bytes:
    return struct.pack("HBBI", code, then, otherwise, value & 0xFFFFFFFF)


def _load(offset: int) -> bytes:
    return _step(0x20, 0, 0, offset)


def _if(value: int, verdict: int) -> bytes:
    return _step(0x15, 0, 1, value) + _step(0x06, 0, 0, verdict)


def _unless(value: int, verdict: int) -> bytes:
    return _step(0x15, 1, 0, value) + _step(0x06, 0, 0, verdict)
