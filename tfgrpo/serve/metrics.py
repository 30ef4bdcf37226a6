"""Counters and sums in the Prometheus text format; labels are configured names only.

Does not know what is counted. Source: the text exposition format 0.0.4.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

__all__ = ["Metrics"]

BUCKETS_S = (0.005, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Metrics:
    """What the process counted since its start.

    >>> metrics = Metrics()
    >>> metrics.add("requests", {"route": "a"})
    >>> "tfgrpo_requests_total{route=\\"a\\"} 1" in metrics.text()
    True
    """

    def __init__(self) -> None:
        self._sums: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._times: dict[tuple[str, str], list[float]] = {}
        self._gauges: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}

    def add(self, name: str, labels: dict[str, str], amount: float = 1.0) -> None:
        """Add to a counter."""
        key = (name, tuple(labels.items()))
        self._sums[key] = self._sums.get(key, 0.0) + amount

    def observe(self, name: str, route: str, seconds: float) -> None:
        """Add a duration to a histogram."""
        row = self._times.get((name, route))
        if row is None:
            row = self._times[name, route] = [0.0] * (len(BUCKETS_S) + 2)
        for i, bound in enumerate(BUCKETS_S):
            if seconds <= bound:
                row[i] += 1
                break
        row[-2] += 1
        row[-1] += seconds

    def set(self, name: str, value: float, labels: Mapping[str, str] | None = None) -> None:
        """Set a gauge."""
        self._gauges[name, tuple((labels or {}).items())] = value

    def text(self) -> str:
        """Return all of it as text."""
        lines: list[str] = []
        for name in sorted({n for n, _ in self._sums}):
            lines.append(f"# TYPE tfgrpo_{name}_total counter")
            for (other, labels), value in sorted(self._sums.items()):
                if other == name:
                    lines.append(f"tfgrpo_{name}_total{_labels(labels)} {value:.12g}")
        for name in sorted({n for n, _ in self._times}):
            lines.append(f"# TYPE tfgrpo_{name}_seconds histogram")
            for (other, route), row in sorted(self._times.items()):
                if other == name:
                    lines += _histogram(name, route, row)
        for name in sorted({n for n, _ in self._gauges}):
            lines.append(f"# TYPE tfgrpo_{name} gauge")
            for (other, labels), value in sorted(self._gauges.items()):
                if other == name:
                    lines.append(f"tfgrpo_{name}{_labels(labels)} {value:.12g}")
        return "\n".join(lines) + "\n"


def _histogram(name: str, route: str, row: Sequence[float]) -> list[str]:
    lines, below = [], 0.0
    for bound, count in zip(BUCKETS_S, row):
        below += count
        labels = _labels((("route", route), ("le", f"{bound:g}")))
        lines.append(f"tfgrpo_{name}_seconds_bucket{labels} {below:.12g}")
    labels = _labels((("route", route), ("le", "+Inf")))
    lines.append(f"tfgrpo_{name}_seconds_bucket{labels} {row[-2]:.12g}")
    lines.append(f"tfgrpo_{name}_seconds_sum{_labels((('route', route),))} {row[-1]:.12g}")
    lines.append(f"tfgrpo_{name}_seconds_count{_labels((('route', route),))} {row[-2]:.12g}")
    return lines


def _labels(rows: Sequence[tuple[str, str]]) -> str:
    def quoted(text: str) -> str:
        return text.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")

    return "{" + ",".join(f'{k}="{quoted(v)}"' for k, v in rows) + "}" if rows else ""
