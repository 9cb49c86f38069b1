"""The demand forecast: seasons, trends, silences, and margins that come from its own errors."""

import math
import random

import pytest

from tokenfleet.fleetmind.planning.forecast import Series

DAY_S = 86_400.0


def day_curve(at_s: float, *, mean: float = 10.0, part: float = 0.5) -> float:
    """Requests per second, peak : trough (1 + part) : (1 - part)."""
    return mean * (1 + part * math.sin(2 * math.pi * at_s / DAY_S))


def fed(days: float, *, dice: random.Random | None = None) -> tuple[Series, float]:
    """A series that saw so many days of the curve."""
    series = Series(tick_s=60.0, season_s=DAY_S, bins=96)
    end_s = days * DAY_S
    at_s = 0.0
    while at_s < end_s:
        expected = day_curve(at_s) * 60.0
        count = expected if dice is None else dice.gauss(expected, math.sqrt(expected))
        series.add(at_s, max(0.0, count))
        at_s += 60.0
    series.advance(end_s)
    return series, end_s


def test_a_known_day_is_foreseen_an_hour_ahead() -> None:
    """The morning's rise was planned for only when it was there: every day the first hour was slow."""
    series, now_s = fed(2.0, dice=random.Random(7))
    for ahead_s in (155.0, 3_600.0):
        assert series.at(now_s, ahead_s) == pytest.approx(day_curve(now_s + ahead_s), rel=0.08)


def test_without_a_season_a_rise_is_carried_on_but_not_for_ever() -> None:
    """A new model's first afternoon: the trend is followed, and damped, for an hour's straight line is a fantasy."""
    series = Series(tick_s=60.0, season_s=DAY_S, bins=96)
    for minute in range(60):
        series.add(minute * 60.0, 60.0 * (1.0 + minute / 30.0))
    series.advance(3_600.0)
    soon, hour = series.at(3_600.0, 155.0), series.at(3_600.0, 3_600.0)
    assert 2.9 < soon < 3.3
    assert soon <= hour < 4.0


def test_a_day_twice_as_busy_as_usual_scales_the_season() -> None:
    """A campaign doubled the traffic and the plan went on by yesterday's."""
    series, now_s = fed(2.4)
    for _ in range(240):
        series.add(now_s, 2.0 * 60.0 * day_curve(now_s))
        now_s += 60.0
    series.advance(now_s)
    assert series.at(now_s, 600.0) == pytest.approx(2 * day_curve(now_s + 600.0), rel=0.1)


def test_a_silence_is_zero_demand_and_not_the_last_known() -> None:
    """Nobody asked for a model any more, and its replicas ran for a week."""
    series = Series(tick_s=60.0, season_s=DAY_S, bins=96)
    for minute in range(30):
        series.add(minute * 60.0, 300.0)
    series.advance(4 * 3_600.0)
    assert series.at(4 * 3_600.0, 155.0) < 1e-6


def test_a_week_of_deafness_costs_no_time_and_keeps_the_season() -> None:
    """FleetMind was down over a holiday: no loop over ten thousand empty minutes, no trend out of them."""
    series, now_s = fed(2.0)
    usual = series.usual(now_s + 3_600.0)
    series.advance(now_s + 7 * DAY_S)
    assert series.usual(now_s + 7 * DAY_S + 3_600.0) == usual
    assert series.level == 0.0


def test_the_margin_is_the_error_that_nine_in_ten_forecasts_kept_within() -> None:
    """A steady series needs no margin; one that jumps asks for one by itself."""
    steady, jumpy = (Series(tick_s=60.0, season_s=DAY_S, bins=96) for _ in range(2))
    dice = random.Random(3)
    for minute in range(400):
        for series, spread in ((steady, 0.0), (jumpy, 0.8)):
            now_s = minute * 60.0
            series.add(now_s, 600.0 * (1 + spread * (dice.random() - 0.5)))
            series.promise(now_s, 180.0)
    assert steady.margin() < 0.02
    assert 0.05 < jumpy.margin() < 0.6
    assert len(jumpy.errors) <= 96
    assert len(jumpy.pending) <= 5


@pytest.mark.parametrize("seed", range(5))
def test_no_forecast_is_negative_or_infinite(seed: int) -> None:
    """Whatever is counted, a plan can be made of it."""
    dice = random.Random(seed)
    series = Series(tick_s=10.0, season_s=600.0, bins=12)
    now_s = dice.random() * 1e6
    for _ in range(500):
        now_s += dice.choice((0.0, 1.0, 30.0, 700.0)) * dice.random()
        series.add(now_s, dice.choice((0.0, 1.0, 1e6)))
        series.promise(now_s, 60.0)
        value = series.peak(now_s, dice.random() * 1_000.0)
        assert 0.0 <= value < 1e9
        assert 0.0 <= series.margin() < 1e9
