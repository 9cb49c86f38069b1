"""How much of something will be asked for soon: one series of rates, with its season, its trend and its own errors.

Decides a forecast for a moment ahead and how wrong such forecasts were lately. A season (a day) is kept as the mean
rate of each of its bins; where it is known for both moments, today's level against the season's scales what comes,
else the level goes on with a damped trend (Holt 1957; Gardner and McKenzie 1985 for the damping). Errors are those of
this very series at this very horizon: a forecast that has been wrong carries its margin. Refuses to know what is
counted.
"""

import math

import msgspec

#: weight of a new tick in the level: as much as this where it counted many events, less where chance is most of it, so
#: that the level always rests on about so many; a tick that chance does not explain is believed more
LEVEL = 0.3
LEVEL_MIN = 0.03
EVENTS = 200.0
SURPRISE = 4.0
SURPRISED = 0.6
#: weight of the level's change in the trend
TREND = 0.1
#: a trend loses so much of itself with each tick ahead
DAMPED = 0.9
#: weight of a new season in a bin's mean, once there have been a few
SEASON = 0.3
#: today is believed to be at most so many times stronger or weaker than the season says
RATIO_MAX = 3.0
#: forecasts compared with what came, newest last
ERRORS_KEPT = 96
#: of a normal distribution, the 90th percentile in standard deviations
NORMAL_90 = 1.2816
#: events that a bin needs before it can scale anything
EVENTS_MIN = 5.0


class Pending(msgspec.Struct, frozen=True):
    """A forecast that waits for its moment."""

    due_s: float
    rate: float


class Series(msgspec.Struct):
    """The history of one rate; seconds throughout, rates per second."""

    #: length of a tick and of a season, bins of a season
    tick_s: float
    season_s: float
    bins: int
    #: start of the tick that is being counted; None: nothing was counted yet
    began_s: float | None = None
    count: float = 0.0
    ticks: int = 0
    level: float = 0.0
    #: of the last tick in the level
    weight: float = LEVEL
    trend: float = 0.0
    #: mean rate of each bin, and in how many seasons it was seen
    season: list[float] = []
    seasons: list[int] = []
    #: the bin being gathered: number, sum of rates, ticks
    gathering: tuple[int, float, int] = (-1, 0.0, 0)
    #: means of bins that the season learns half a season later: today is compared with the days before it
    fresh: list[tuple[int, float]] = []
    pending: list[Pending] = []
    #: relative errors of forecasts that came due: (what came - forecast) / forecast
    errors: list[float] = []

    def add(self, now_s: float, amount: float = 1.0) -> None:
        """Count what was asked for now."""
        self.advance(now_s)
        self.count += amount

    def advance(self, now_s: float) -> None:
        """Close the ticks that are over; a silence of many ticks is many zeros, but costs no more than a season's."""
        if self.began_s is None:
            self.began_s = math.floor(now_s / self.tick_s) * self.tick_s
            self.season = [0.0] * self.bins
            self.seasons = [0] * self.bins
            return
        if now_s - self.began_s > self.season_s:  # nobody listened for a whole season: only the season is still true
            self.began_s = math.floor(now_s / self.tick_s) * self.tick_s
            self.count, self.level, self.trend = 0.0, 0.0, 0.0
            self.pending, self.fresh, self.gathering = [], [], (-1, 0.0, 0)
            return
        while now_s >= self.began_s + self.tick_s:
            self._close(self.began_s, self.count / self.tick_s)
            self.began_s += self.tick_s
            self.count = 0.0

    def _close(self, began_s: float, rate: float) -> None:
        before = self.level
        if self.ticks == 0:
            self.level = rate
        else:
            expected = max(0.0, self.level + DAMPED * self.trend)
            weight = self._weight(expected, rate)
            self.level = max(0.0, expected + weight * (rate - expected))
            self.trend = TREND * (self.level - before) + (1 - TREND) * DAMPED * self.trend
            self.weight = weight
        self.ticks += 1
        self._gather(began_s, rate)
        ended_s = began_s + self.tick_s
        while self.pending and self.pending[0].due_s <= ended_s:
            made = self.pending.pop(0)
            floor = EVENTS_MIN / (self.season_s / self.bins)
            self.errors = [*self.errors, (self.level - made.rate) / max(made.rate, floor)][-ERRORS_KEPT:]

    def _weight(self, expected: float, rate: float) -> float:
        """How much a tick's rate says of the level: less where so few events are mostly chance (Poisson)."""
        events = expected * self.tick_s
        if abs(rate - expected) * self.tick_s > SURPRISE * math.sqrt(max(events, 1.0)):
            return SURPRISED
        return min(LEVEL, max(LEVEL_MIN, events / EVENTS))

    def _gather(self, began_s: float, rate: float) -> None:
        number = self._bin(began_s)
        known, total, ticks = self.gathering
        if known != number:
            if known >= 0 and ticks:
                if self.seasons[known]:
                    self.fresh.append((known, total / ticks))
                else:
                    self._learn(known, total / ticks)
                if len(self.fresh) > self.bins // 2:
                    self._learn(*self.fresh.pop(0))
            total, ticks = 0.0, 0
        self.gathering = (number, total + rate, ticks + 1)

    def _learn(self, number: int, mean: float) -> None:
        self.seasons[number] += 1
        self.season[number] += max(SEASON, 1.0 / self.seasons[number]) * (mean - self.season[number])

    def _bin(self, at_s: float) -> int:
        return int(at_s % self.season_s / self.season_s * self.bins) % self.bins

    def usual(self, at_s: float) -> float | None:
        """What the season says of a moment, between the middles of its bins; None where it was never seen."""
        if not self.season:
            return None
        place = at_s % self.season_s / self.season_s * self.bins - 0.5
        low = math.floor(place)
        part = place - low
        one, other = low % self.bins, (low + 1) % self.bins
        if not self.seasons[one] or not self.seasons[other]:
            return None
        return (1 - part) * self.season[one] + part * self.season[other]

    def at(self, now_s: float, ahead_s: float) -> float:
        """Expected rate in so many seconds."""
        ticks = ahead_s / self.tick_s
        # the level is of the last ticks, which are some way back
        lag_s = self.tick_s * (1 - self.weight) / self.weight
        here, there = self.usual(now_s - lag_s), self.usual(now_s + ahead_s)
        if here is not None and there is not None:
            enough = here * self.season_s / self.bins >= EVENTS_MIN
            if enough:
                ratio = min(RATIO_MAX, max(1.0 / RATIO_MAX, self.level / here))
                return there * ratio
            return max(0.0, there + self.level - here)
        carried = self.trend * DAMPED * (1 - float(DAMPED**ticks)) / (1 - DAMPED)
        return max(0.0, self.level + carried)

    def peak(self, now_s: float, until_s: float) -> float:
        """Greatest expected rate between now and so many seconds ahead."""
        steps = max(1, min(24, round(until_s / self.tick_s)))
        return max(self.at(now_s, until_s * n / steps) for n in range(steps + 1))

    def promise(self, now_s: float, ahead_s: float) -> None:
        """Remember the forecast for that moment, to be compared with what comes."""
        self.pending.append(Pending(now_s + ahead_s, self.at(now_s, ahead_s)))

    def margin(self, quantile: float = 0.9) -> float:
        """Relative error that forecasts exceeded in no more than 1 - quantile of cases, less what chance explains.

        0 while none came due. What arrives by chance around a rate is no error of the rate, and whoever plans with it
        has a margin for that.
        """
        if not self.errors:
            return 0.0
        ranked = sorted(self.errors)
        found = max(0.0, ranked[min(len(ranked) - 1, int(quantile * len(ranked)))])
        events = max(self.level, EVENTS_MIN / (self.season_s / self.bins)) * self.tick_s
        # variance of an exponentially weighted mean of Poisson counts, relative; forecast and outcome both have it
        chance = 2.0 * self.weight / (2.0 - self.weight) / events
        return math.sqrt(max(0.0, found * found - NORMAL_90**2 * chance))
