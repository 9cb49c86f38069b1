"""TokenPilot's choice with exact knowledge of what engines hold."""

from typing import Any

from tests.unit.tokenpilot.driver import Pilot, ask

from tokenfleet import prefix
from tokenfleet_schemas.kv import KvChanged, KvRequested
from tokenfleet_schemas.placement import PlacementAssigned

KEY = prefix.tenant_key("k", "acme")
CHAIN = prefix.digests(b"s" * 4096, KEY)
PACKED = prefix.pack(CHAIN)[0]


def changed(pilot: Pilot, sequence: int, instance: str = "b-1", **more: Any) -> KvChanged:
    """What the site agent says of an instance."""
    incarnation = more.pop("incarnation", pilot.core.state.load(instance).incarnation)
    return KvChanged(
        id=f"kv:{instance}:{sequence}",
        site=more.pop("site", "b"),
        model="m",
        instance=instance,
        incarnation=incarnation,
        sequence=sequence,
        **more,
    )


def asked(pilot: Pilot, request_id: str) -> PlacementAssigned:
    """Place one request with the prefix, and end it."""
    (assigned,) = [
        event
        for event in pilot.request(request_id, input_tokens=4200, prefix=PACKED)
        if isinstance(event, PlacementAssigned)
    ]
    pilot.finish(assigned)
    return assigned


def test_a_prefix_that_only_the_engine_told_of_is_gone_to_and_an_evicted_one_is_not() -> None:
    """Another replica, or a caller past the gateway, warmed an instance; what it threw out is no reason to go there."""
    pilot = Pilot()
    pilot.hear(changed(pilot, 5, snapshot=True, stored=CHAIN))
    first = asked(pilot, "r0")
    assert (first.instance, first.prefix_hit_tokens) == ("b-1", 4096)
    pilot.hear(changed(pilot, 6, removed=CHAIN[8:]))
    assert asked(pilot, "r1").prefix_hit_tokens == 64
    pilot.hear(changed(pilot, 7, cleared=True))
    assert pilot.core.index.hit_tokens("b-1", pilot.core._chain(ask("x", prefix=PACKED)), 1) == 0
    assert pilot.core.gauges()["prefix_exact"] == {(("instance", "b-0"),): 0.0, (("instance", "b-1"),): 1.0}


def test_a_gap_is_answered_by_asking_and_a_restart_by_forgetting() -> None:
    """S08, S09: a lost message or a new process leaves nothing that is believed, and the agent is asked."""
    pilot = Pilot()
    pilot.core.exact.asks = True
    pilot.hear(changed(pilot, 5, snapshot=True, stored=CHAIN))
    (wanted,) = pilot.hear(changed(pilot, 8, stored=CHAIN[:8]))
    assert isinstance(wanted, KvRequested)
    assert (wanted.instance, wanted.sequence) == ("b-1", 8)
    assert asked(pilot, "r0").prefix_hit_tokens == 0
    pilot.hear(changed(pilot, 9, snapshot=True, stored=CHAIN))
    assert pilot.core.exact.is_exact("b-1")
    # the new process's first snapshot comes before its first report: the report does not wipe it out
    pilot.hear(changed(pilot, 10, snapshot=True, stored=CHAIN[:80], incarnation="anew"))
    pilot.report("b-1", incarnation="anew")
    assert pilot.core.index.hit_tokens("b-1", pilot.core._chain(ask("x", prefix=PACKED)), 1) == 640
    # the next one is seen by its report first
    pilot.report("b-1", incarnation="anew again")
    assert pilot.core.index.hit_tokens("b-1", pilot.core._chain(ask("x", prefix=PACKED)), 1) == 0


def test_other_sites_and_strangers_are_not_followed() -> None:
    """S10: a removed instance's queued events brought it back into the index."""
    pilot = Pilot()
    pilot.hear(changed(pilot, 5, snapshot=True, stored=CHAIN, site="c"))
    pilot.hear(changed(pilot, 5, "gone", snapshot=True, stored=CHAIN, incarnation="1"))
    assert len(pilot.core.index) == 0


def test_hits_that_never_come_lose_their_weight() -> None:
    """P13: the engine's own count of cached tokens said 0 for two hundred requests, and affinity went on."""
    pilot = Pilot()
    pilot.hear(changed(pilot, 5, snapshot=True, stored=CHAIN))
    for n in range(60):
        (assigned,) = [
            event
            for event in pilot.request(f"r{n}", input_tokens=4200, prefix=PACKED)
            if isinstance(event, PlacementAssigned)
        ]
        pilot.finish(assigned, cached_tokens=0, prefix_hit_tokens_predicted=assigned.prefix_hit_tokens)
    mistrusted = [note.labels["instance"] for note in pilot.notes if note.name == "hash_mismatch"]
    assert "b-1" in mistrusted
    assert pilot.core.gauges()["prefix_trust"][(("instance", "b-1"),)] < 0.1
    assert asked(pilot, "last").prefix_hit_tokens < 400
