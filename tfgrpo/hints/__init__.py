"""Hint schedulers: when a task gets which hint. Imports no torch.

`make_scheduler` reads the `[hints]` section of a training run; `writer.write_hints` has a model
write the hints beforehand; `shaping` tells a training row what its plan asks for. Does not know
tokens or weights. Sources: named in each file.
"""

from tfgrpo.hints.settings import make_scheduler

__all__ = ["make_scheduler"]
