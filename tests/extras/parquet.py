"""`parquet`: groups are written as Parquet and read back."""

import asyncio
from pathlib import Path

from tfgrpo import ChatPolicy, Task, open_lm, sample_group
from tfgrpo.store.export import read_groups, write_groups
from tfgrpo.verifiers import Exact

policy = ChatPolicy(open_lm("scripted:echo"))
group = asyncio.run(sample_group(Task("t", "yes", reference="yes"), policy, Exact()))
assert write_groups(Path("groups.parquet"), [group]) == 1
(back,) = read_groups(Path("groups.parquet"))
assert back.rewards_G == group.rewards_G
