"""Two models on one site's GPUs: their engines know nothing of each other, so that who releases must."""

from collections import Counter

import msgspec
from tests.simulation.harness import SMALL
from tests.simulation.messages import Bench, assigned, finished, held, make_ask, offered
from tests.unit.slomax.test_slomax_core import INSTANCES

from tokenfleet import fleet as fleets
from tokenfleet.fleet import Fleet
from tokenfleet.slomax import devices
from tokenfleet.slomax.core import SLOMax
from tokenfleet_schemas.placement import PlacementReleased
from tokenfleet_schemas.room import RoomDeclined

SECOND = """
[sites.b.instances.b-9]
model = "n"
version = "1"
url = "http://127.0.0.1:1/b-9"
gpu_group = "{group}"
[models.n]
versions = ["1"]
default_version = "1"
max_model_len = 131072
tokenizer = "bytes"
"""
#: GPU-time of a request, prefill and answer
COST_MS = 200.0


def fleet_of(group: str = "shared") -> Fleet:
    text = SMALL.format(instances=INSTANCES)
    text = text.replace('url = "http://127.0.0.1:1/b-0"\n', f'url = "http://127.0.0.1:1/b-0"\ngpu_group = "{group}"\n')
    text = text.replace('homes = { m = ["b", "c"] }', 'homes = { m = ["b", "c"], n = ["b"] }')
    return fleets.parse((text + SECOND.format(group=group)).encode())


class Site:
    """Two engines that offer room every 100 ms, whatever else runs; counts what is released to each model."""

    def __init__(self, fleet: Fleet) -> None:
        self.bench = Bench(SLOMax(fleet, replica="slomax-1"), fleet)
        self.bench.report()
        self.number = 0
        self.classes: dict[str, str] = {}

    def hold(self, model: str, service_class: str, count: int) -> None:
        for _ in range(count):
            self.number += 1
            ask = make_ask(f"{model}-{self.number}", model=model, model_asked=model, service_class=service_class)
            self.classes[ask.request_id] = service_class
            hold = held(ask, home_instance=self.of(model), slack_ms=60_000.0, patience_left_ms=250_000.0)
            # Its prefill of 1,000 tokens takes half of that time, its 50 tokens of answer hardly any of the rest.
            self.bench.feed(msgspec.structs.replace(hold, predicted_own_ms=COST_MS / 1.1))

    def waiting(self, model: str) -> int:
        pool = self.bench.core.state.pools.get(("b", model, "1"))
        return 0 if pool is None else pool.waiting()

    @staticmethod
    def of(model: str) -> str:
        return {"m": "b-0", "n": "b-9"}[model]

    def tick(self) -> Counter[str]:
        """A tenth of a second: room for one request at every engine that has something held."""
        self.bench.now_ms += 100.0
        got: Counter[str] = Counter()
        for model in ("n", "m"):
            if self.waiting(model):
                self.number += 1
                done = self.bench.core.state.pools["b", model, "1"].number
                room = offered(
                    self.of(model), self.number, prefill_tokens=1_000, idle=False, last_released=done, model=model
                )
                for one in self.bench.of(PlacementReleased, self.bench.feed(room)):
                    got[one.model] += 1
                    ask = make_ask(one.request_id, model=model, service_class=self.classes[one.request_id])
                    self.bench.feed(assigned(ask, instance=one.instance, release_number=one.number), finished(ask))
        return got


class TestTogether:
    """Both hold requests."""

    def test_each_gets_its_part_of_the_gpus(self) -> None:
        """A night's batch on one model filled its engine, and chats on the other took twice as long."""
        site = Site(fleet_of())
        got: Counter[str] = Counter()
        for _ in range(300):
            for model, service_class in (("m", "chat"), ("n", "batch")):
                if site.waiting(model) < 5:
                    site.hold(model, service_class, 5)
            got += site.tick()
        # Half a minute of one group of GPUs, divided 4 : 1 as the shares of the classes are.
        assert 0.9 * 24_000 < got["m"] * COST_MS < 1.1 * 24_000 + devices.AHEAD_MS, got
        assert 0.9 * 6_000 < got["n"] * COST_MS < 1.1 * 6_000 + devices.AHEAD_MS, got
        assert "shared_gpus" in {one.reason for one in site.bench.of(RoomDeclined)}

    def test_on_gpus_of_their_own_nobody_waits_for_the_other(self) -> None:
        """The same without a group: every engine takes what comes."""
        site = Site(fleet_of(""))
        got: Counter[str] = Counter()
        for _ in range(100):
            for model, service_class in (("m", "chat"), ("n", "batch")):
                if site.waiting(model) < 5:
                    site.hold(model, service_class, 5)
            got += site.tick()
        assert got == {"m": 100, "n": 100}
        assert site.bench.core.state.meters == {}


class TestAlone:
    """Only one of them holds anything."""

    def test_what_the_other_does_not_want_is_free(self) -> None:
        """A fixed split left half of the GPUs idle at night."""
        site = Site(fleet_of())
        got: Counter[str] = Counter()
        for _ in range(100):
            if site.waiting("n") < 5:
                site.hold("n", "batch", 5)
            got += site.tick()
        assert got["n"] == 100

    def test_what_was_taken_alone_is_not_owed_later(self) -> None:
        """The first chat of the morning kept the batch out for as long as it had worked at night."""
        site = Site(fleet_of())
        for _ in range(100):
            if site.waiting("n") < 5:
                site.hold("n", "batch", 5)
            site.tick()
        got: Counter[str] = Counter()
        for _ in range(100):
            for model, service_class in (("m", "chat"), ("n", "batch")):
                if site.waiting(model) < 5:
                    site.hold(model, service_class, 5)
            got += site.tick()
        assert got["n"] * COST_MS > 0.8 * 2_000


def test_a_successor_goes_on_from_the_same_meters() -> None:
    """A takeover in the middle of a burst gave it a fresh start."""
    site = Site(fleet_of())
    site.hold("m", "chat", 20)
    site.hold("n", "batch", 20)
    standby = Bench(SLOMax(site.bench.fleet, replica="slomax-2"), site.bench.fleet, office=False)
    standby.core.restore(site.bench.core.snapshot())
    for _ in range(10):
        before = len(site.bench.said)
        site.tick()
        standby.now_ms = site.bench.now_ms
        standby.feed(*site.bench.of(PlacementReleased, site.bench.said[before:]))
    assert site.bench.core.state.meters["b", "n", "1", "shared"].ahead_ms > devices.AHEAD_MS / 2
    for key, meter in standby.core.state.meters.items():
        assert abs(meter.ahead_ms - site.bench.core.state.meters[key].ahead_ms) < 2 * COST_MS
    again = SLOMax(site.bench.fleet, replica="slomax-3")
    again.restore(site.bench.core.snapshot())
    assert again.state.meters == site.bench.core.state.meters
