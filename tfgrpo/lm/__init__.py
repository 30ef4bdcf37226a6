"""Text models behind one protocol, one file a backend; a spec string selects each.

Does not know tasks, caches, budgets or retries: one call is one call, its failure is typed.
"""

from tfgrpo.lm.spec import Spec, fleet_options, open_lm, parse_spec

__all__ = ["Spec", "fleet_options", "open_lm", "parse_spec"]
