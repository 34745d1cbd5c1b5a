"""What steps take beside their passes."""

import pytest

from verdraft.spec.host_time import HostTime


def test_it_learns_what_steps_take_beside_their_passes() -> None:
    host = HostTime()
    assert host.of(1) == 0.0
    for _ in range(100):
        host.learn(5, expected=1.0, seconds=1.4)
    assert host.of(4) == host.of(7) == pytest.approx(0.4, abs=0.01)
    assert host.of(3) == host.of(8) == 0.0


def test_what_was_disturbed_or_too_quick_counts_for_little() -> None:
    host = HostTime()
    host.learn(1, expected=1.0, seconds=1000.0)
    assert host.of(1) == pytest.approx(0.05)
    for _ in range(200):
        host.learn(1, expected=1.0, seconds=0.5)
    assert 0.0 <= host.of(1) < 1e-4
