"""How many requests one caller may make."""

from phalanx.jobs.api.middleware import RateLimiter


def test_a_burst_then_a_steady_rate_for_each_caller():
    now = 100.0
    rates = RateLimiter(per_second=2, burst=3, clock=lambda: now)
    assert [rates.take("a") for _ in range(3)] == [0, 0, 0]
    assert rates.take("a") == 0.5
    assert rates.take("b") == 0
    now += 0.5
    assert rates.take("a") == 0
    assert rates.take("a") > 0
    now += 1000
    assert [rates.take("a") for _ in range(3)] == [0, 0, 0]
    assert rates.take("a") > 0
