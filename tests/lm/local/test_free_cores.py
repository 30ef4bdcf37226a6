"""How many cores others leave: on made-up clocks, then beside a process that works."""

import os
import subprocess
import sys

import pytest

from tfgrpo.lm.local.free_cores import FreeCores, busy_seconds, own_seconds, usable_cores


class Machine:
    """A clock and two counters of processor time."""

    def __init__(self):
        self.now = self.own = self.others = 0.0

    def run(self, seconds, own, others):
        """Let time pass in which we use `own` cores and others use `others`."""
        self.now += seconds
        self.own += own * seconds
        self.others += others * seconds

    def cores(self, cores):
        return FreeCores(
            cores,
            busy=lambda: self.own + self.others,
            own=lambda: self.own,
            clock=lambda: self.now,
        )


@pytest.mark.parametrize(
    ("cores", "own", "others", "free"),
    [
        (2, 2.0, 0.0, 2),
        (2, 1.9, 0.1, 2),
        (2, 1.6, 0.4, 2),  # 2 (1 - 0.4) is more than 1
        (2, 1.45, 0.55, 1),
        (2, 1.33, 0.67, 1),  # one busy program beside our two threads
        (2, 1.0, 1.0, 1),
        (2, 0.4, 1.6, 1),  # never none
        (8, 7.875, 0.125, 8),
        (8, 7.75, 0.25, 7),
        (8, 0.0, 3.0, 5),
        (8, 0.0, 2.8, 5),
        (8, 0.0, 2.5, 5),
    ],
)
def test_free_is_what_others_do_not_use(cores, own, others, free):
    machine = Machine()
    found = machine.cores(cores)
    assert found.count() == cores  # nothing is known yet
    machine.run(1.0, own, others)
    assert found.count() == free


def test_a_look_lasts_for_a_period_and_the_next_one_sees_the_change():
    machine = Machine()
    found = machine.cores(4)
    found.count()
    machine.run(1.0, 1.0, 3.0)
    assert found.count() == 1
    machine.run(0.4, 4.0, 0.0)
    assert found.count() == 1
    machine.run(0.6, 4.0, 0.0)
    assert found.count() == 4


def test_a_system_that_tells_nothing_counts_as_idle():
    found = FreeCores(3, busy=lambda: None)
    assert found.count() == found.count() == 3


@pytest.mark.skipif(not os.path.exists("/proc/stat"), reason="Linux tells in /proc/stat")
def test_another_program_is_seen_at_work():
    assert len(usable_cores()) >= 1
    before = busy_seconds() - own_seconds()
    code = "import time\nwhile time.process_time() < 0.5: pass"
    subprocess.run([sys.executable, "-c", code], check=True)
    assert busy_seconds() - own_seconds() - before > 0.4
