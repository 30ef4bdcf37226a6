"""A fleet's rules on a simulated clock: throughput against the ideal, affinity, the tail."""

from __future__ import annotations

import pytest

from tests.lm.fleet.virtual import Simulated, closed_loop, run_virtual, stalling

UNEVEN = (1.0, 1.0, 1.5, 1.5, 2.0, 2.0, 3.0, 4.0)


def uneven(**dies: float) -> list[Simulated]:
    return [
        Simulated(s / 4, s * 3 / 4, dies_at_s=dies.get(f"s{i}", float("inf")))
        for i, s in enumerate(UNEVEN)
    ]


def test_uneven_servers_of_which_two_die_are_kept_busy_and_groups_together() -> None:
    async def run() -> None:
        servers = uneven(s1=30.0, s4=45.0)
        done = await closed_loop(servers, calls=3000, width=128)
        assert done.throughput_ratio > 0.93
        assert done.together > 0.93
        assert 0 < done.retries < 60  # those in flight when the two died, and their probes
        assert sum(s.served for s in servers) == 3000

    run_virtual(run())


@pytest.mark.parametrize("stall_s", [2.0, 5.0])
def test_asking_twice_for_late_first_tokens_cuts_the_tail(stall_s: float) -> None:
    async def run(share: float) -> tuple[float, float, float]:
        servers = [
            Simulated(0.2, 0.2, slots=64, stalls=stalling(i, 0.02, stall_s)) for i in range(8)
        ]
        done = await closed_loop(servers, calls=2000, width=6, share=share)
        return done.p50_s, done.p99_s, done.hedged

    plain, hedged = run_virtual(run(0.0)), run_virtual(run(0.05))
    assert plain[1] == pytest.approx(0.4 + stall_s)
    assert hedged[1] == pytest.approx(0.6, abs=0.05)  # late after 0.2 s, and once more 0.4 s
    assert hedged[0] == plain[0] == pytest.approx(0.4)
    assert 0.01 < hedged[2] <= 0.05
