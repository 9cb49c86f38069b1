"""The predictor learns an engine from outcomes alone, and sees its own error (P16)."""

import random
import statistics

import pytest

from tokenfleet.tokenpilot.predictor import (
    ENOUGH,
    Margin,
    Model,
    Regression,
    Residual,
    level,
    pairs_of,
    tpot_features,
    ttft_features,
)

BUDGET = 8192.0


class Machine:
    """An engine as the predictor supposes one, with its own constants and some noise."""

    def __init__(
        self, c_ms: float, *, pair: float = 4e-5, step_ms: float = 6.0, kv: float = 2e-3, seed: int = 1
    ) -> None:
        self.c_ms, self.pair, self.step_ms, self.kv = c_ms, pair, step_ms, kv
        self.dice = random.Random(seed)
        self.slow = 1.0

    def request(self) -> tuple[list[float], float]:
        """Features of some request and the TTFT that it gets."""
        d = self.dice
        own = d.choice((100, 800, 4000, 12_000, 40_000)) * (0.5 + d.random())
        ahead = d.choice((0, 0, 3000, 12_000))
        decoding, kv = d.randint(0, 40), d.random() * 200_000
        features = ttft_features(ahead, pairs_of(ahead, 0), own, pairs_of(own, 2000), decoding, kv, BUDGET)
        truth = [20.0, self.c_ms, self.pair * self.c_ms, self.step_ms, self.kv * self.c_ms]
        actual = self.slow * sum(t * f for t, f in zip(truth, features, strict=True))
        return features, actual * self.dice.lognormvariate(0.0, 0.05)


def follow(model: Model, machine: Machine, count: int) -> tuple[list[float], int | None]:
    """Relative errors of predictions made before each outcome, and after how many requests drift was said."""
    errors, alarm = [], None
    for n in range(count):
        features, actual = machine.request()
        predicted = model.ttft.predict(features)
        errors.append(abs(predicted - actual) / actual)
        if model.learn_ttft(features, predicted, actual) and alarm is None:
            alarm = n + 1
    return errors, alarm


@pytest.mark.parametrize("wrong", [0.5, 1.0, 2.0])
@pytest.mark.parametrize("c_ms", [0.022, 0.175])
def test_each_machine_is_learned_whatever_was_declared_of_it(c_ms: float, wrong: float) -> None:
    """Mixed hardware under one declared rate: everything was predicted as for the slowest."""
    model = Model.of("m 1", wrong * 1000.0 / c_ms, 2000.0)
    errors, _ = follow(model, Machine(c_ms), 200)
    assert statistics.median(errors[100:]) < 0.08


@pytest.mark.parametrize("factor", [2.0, 3.0])
def test_a_degraded_card_is_noticed_and_learned(factor: float) -> None:
    """P16: an instance became twice as slow; nobody saw the predictor's error, and it stayed wrong."""
    machine = Machine(0.022)
    model = Model.of("m 1", 1000.0 / 0.022, 2000.0)
    _, false_alarm = follow(model, machine, 600)
    assert false_alarm is None, "no drift where there is none"
    machine.slow = factor
    errors, alarm = follow(model, machine, 300)
    assert alarm is not None
    assert alarm <= 100
    assert statistics.median(errors[100:]) < 0.2
    errors, _ = follow(model, machine, 100)
    assert statistics.median(errors) < 0.2


@pytest.mark.parametrize("factor", [3.0, 6.0])
def test_a_sudden_change_of_pace_is_believed_within_ten_answers(factor: float) -> None:
    """A throttled engine was sent chats for a minute, as its regression still believed in hundreds of fast answers; and
    when it was well again nobody did believe that either."""
    machine = Machine(0.022)
    model = Model.of("m 1", 1000.0 / 0.022, 2000.0)
    follow(model, machine, 400)
    dice = random.Random(4)

    def answers(count: int, slow: float) -> list[float]:
        errors = []
        for _ in range(count):
            decoding, kv = dice.randint(1, 40), dice.random() * 200_000
            features = tpot_features(decoding, kv, 0)
            actual = slow * (7.0 + 0.022 * decoding + 7e-5 * kv) * dice.lognormvariate(0.0, 0.05)
            errors.append(abs(model.tpot.predict(features) - actual) / actual)
            model.learn_tpot(features, actual)
        return errors

    assert statistics.median(answers(400, 1.0)[300:]) < 0.1
    assert statistics.median(answers(20, factor)[10:]) < 0.25
    assert statistics.median(answers(200, factor)) < 0.15
    assert statistics.median(answers(20, 1.0)[10:]) < 0.25


def test_noise_is_no_new_level() -> None:
    """First tokens scatter by half; a level that jumped with every run of them would be worse than none."""
    dice = random.Random(5)
    recent: list[float] = []
    factors = [level(recent, 100.0, 100.0 * dice.lognormvariate(0.0, 0.4), 0.6) for _ in range(3000)]
    assert sum(factor != 1.0 for factor in factors) <= 15


def test_an_instance_without_any_known_rate_says_nothing_before_it_has_learned() -> None:
    """Unknown is never a number; what was measured is."""
    model = Model.of("m 1", None, 2000.0)
    assert not model.known
    follow(model, Machine(0.022), ENOUGH)
    assert model.known


def test_coefficients_never_run_away_while_only_one_kind_of_request_comes() -> None:
    """Forgetting without excitation: hours of equal requests, then one other was predicted at minus a minute."""
    model = Model.of("m 1", 50_000.0, 2000.0)
    features = ttft_features(0, 0, 500, pairs_of(500, 0), 1, 1000, BUDGET)
    for _ in range(5000):
        model.learn_ttft(features, 30.0, 30.0)
    assert model.ttft.predict(features) == pytest.approx(30.0, rel=0.02)
    other = ttft_features(10_000, pairs_of(10_000, 0), 60_000, pairs_of(60_000, 0), 50, 200_000, BUDGET)
    prior = Regression.of(model.ttft.prior).predict(other)
    assert 0.2 * prior < model.ttft.predict(other) < 5 * prior


def test_one_stuck_request_is_no_new_hardware() -> None:
    """A request that hung for a minute made its instance look a thousand times slower."""
    machine = Machine(0.022)
    model = Model.of("m 1", 1000.0 / 0.022, 2000.0)
    follow(model, machine, 200)
    features, actual = machine.request()
    model.learn_ttft(features, actual, 1000.0 * actual)
    errors, _ = follow(model, machine, 20)
    assert statistics.median(errors) < 0.5


def test_time_per_token_is_learned() -> None:
    """The pace depends on who decodes beside it, not on the instance alone."""
    model, dice = Model.of("m 1", 45_000.0, 2000.0), random.Random(3)
    errors = []
    for _ in range(300):
        decoding, kv, beside = dice.randint(0, 100), dice.random() * 300_000, dice.random() * 20_000
        features = tpot_features(decoding, kv, beside)
        actual = 8.0 + 0.02 * decoding + 7e-5 * kv + 1e-4 * beside
        errors.append(abs(model.tpot.predict(features) - actual) / actual)
        model.tpot.learn(features, actual)
    assert statistics.median(errors[150:]) < 0.05


def test_the_residual_is_used_only_while_it_is_better() -> None:
    """A learned correction that had gone stale made every prediction worse than plain physics."""
    residual, dice = Residual(), random.Random(2)
    for _ in range(200):
        residual.learn(3, 100.0, 150.0 * dice.lognormvariate(0, 0.1))
    assert residual.helps
    assert residual.means[3] == pytest.approx(0.5, abs=0.1)
    for _ in range(200):
        residual.learn(3, 100.0, 100.0 * dice.lognormvariate(0, 0.1))
        if not residual.helps:
            break
    else:
        assert abs(residual.means[3]) < 0.1, "or it has become harmless"


def test_the_margin_covers_nine_of_ten() -> None:
    """A fixed 10% margin was missed by every third request of a bursty class."""
    margin, dice = Margin(), random.Random(4)
    covered = 0
    for n in range(4000):
        actual = 100.0 * dice.lognormvariate(0.0, 0.4)
        covered += n >= 2000 and actual <= 100.0 * (1.0 + margin.share)
        margin.learn(100.0, actual)
    assert 0.86 <= covered / 2000 <= 0.94
