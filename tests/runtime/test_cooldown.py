"""Cooldowns of hosts: windows of failures, and rests that grow."""

from __future__ import annotations

import pytest

from tfgrpo.errors import ProviderError
from tfgrpo.runtime.cooldown import Cooldowns

DOWN = ProviderError("no", kind="overloaded")


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_failures_that_are_long_ago_are_forgotten() -> None:
    clock = Clock()
    hosts = Cooldowns(cooldown_s=10, allowed_failures=2, window_s=10, clock=clock)
    for at in (0.0, 6.0, 12.0):
        clock.now = at
        hosts.failed("a", DOWN)
    assert hosts.state("a") == "healthy"  # the first one is 12 s ago
    clock.now = 14.0
    hosts.failed("a", DOWN)
    assert hosts.state("a") == "cooling"


@pytest.mark.parametrize(("most_s", "rests"), [(60.0, [10, 20, 40, 60, 60]), (0.0, [10] * 5)])
def test_each_rest_in_a_row_is_twice_as_long_up_to_the_most(
    most_s: float, rests: list[float]
) -> None:
    clock = Clock()
    hosts = Cooldowns(cooldown_s=10, most_s=most_s, clock=clock)
    for rest in rests:
        hosts.started("a")
        for _ in range(3):  # calls of one fall, which were in flight together
            hosts.failed("a", DOWN)
        clock.now += rest - 0.1
        assert hosts.state("a") == "cooling"
        clock.now += 0.1
        assert hosts.state("a") == "probe"
    hosts.succeeded("a")
    hosts.failed("a", DOWN)
    clock.now += 10.0
    assert hosts.state("a") == "probe"  # an answer starts it over


def test_the_hosts_own_hint_holds() -> None:
    clock = Clock()
    hosts = Cooldowns(cooldown_s=10, most_s=60, clock=clock)
    hosts.failed("a", ProviderError("no", kind="rate_limit", retry_after_s=2.0))
    clock.now = 2.0
    assert hosts.state("a") == "probe"
