"""The five houses; simulators may import nothing from here."""

from tests.benchmarks.learning.house_rules.families.family import Case, Family, Split
from tests.benchmarks.learning.house_rules.families.formats import FORMATS
from tests.benchmarks.learning.house_rules.families.labels import LABELS
from tests.benchmarks.learning.house_rules.families.letters import LETTERS
from tests.benchmarks.learning.house_rules.families.thresholds import THRESHOLDS
from tests.benchmarks.learning.house_rules.families.tools import TOOLS

FAMILIES: dict[str, Family] = {f.name: f for f in (LABELS, THRESHOLDS, FORMATS, TOOLS, LETTERS)}

__all__ = ["FAMILIES", "Case", "Family", "Split"]
