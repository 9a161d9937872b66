"""What reads more the longer vacuum is held back takes a bounded share of the time."""

from types import SimpleNamespace

import pytest

from towpath.consumer import pace


@pytest.mark.parametrize(("took_seconds", "pause_seconds"), [(0.01, 0.2), (3.0, 60.0), (90.0, 600.0)])
def test_what_takes_long_comes_seldom(
    monkeypatch: pytest.MonkeyPatch, took_seconds: float, pause_seconds: float
) -> None:
    """R3: also where it failed, as a statement does that ran into its limit of time."""
    clock = SimpleNamespace(now=1000.0, monotonic=lambda: clock.now)
    monkeypatch.setattr(pace, "time", clock)
    paced = pace.Pace()
    assert paced.is_due

    def take_long() -> None:
        with paced:
            clock.now += took_seconds
            raise TimeoutError

    with pytest.raises(TimeoutError):
        take_long()
    clock.now += pause_seconds - 0.1
    assert not paced.is_due
    clock.now += 0.2
    assert paced.is_due
