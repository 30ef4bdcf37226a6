"""Second tries within a visit, as hint schedulers: drafts, perturbations, reflections, recycling.

Imports no torch. Does not know tokens or weights. Sources: named in each file.
"""

from tfgrpo.hints.second_tries.sections import SECTIONS

__all__ = ["SECTIONS"]
