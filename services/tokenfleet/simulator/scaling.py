"""Replicas that come and go in a run: by FleetMind's plans, by a reactive threshold, or not at all.

Decides what a site's agent does with a plan, by the live agent's own object (`siteagent.actuation`), and how two other
systems would scale: static provisioning (every declared replica runs all the time) and a reactive autoscaler, which is
Kubernetes' horizontal pod autoscaler on the pools' utilisation: `desired = ceil(current * utilisation / target)`, no
change within 10% of the target, downwards only by the highest wish of the last `down_after_s` (its documented
defaults: every 15 s, 300 s). All start and stop through the same orders, with the same cold starts and drains.
Refuses to know requests.

Durations of `[scaling]` and of `[planning]` pass `planning.time_scale` times as fast: a day can be lived in minutes.
"""

import math
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

import msgspec

from tokenfleet.effects import Effect, Publish
from tokenfleet.fleet import Actuator, Fleet
from tokenfleet.fleetmind.core import FleetMind
from tokenfleet.fleetmind.longcycle import MakePlan
from tokenfleet.simulator.arrivals import Arrival
from tokenfleet.simulator.bus import Bus, Node
from tokenfleet.simulator.instances import SimulatedInstance
from tokenfleet.simulator.loop import Loop
from tokenfleet.simulator.scenario import ScalingSpec, Scenario
from tokenfleet.siteagent.actuation import Actuation
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.plan import PlanIssued, Target
from tokenfleet_schemas.request import Ask


class Stage(Protocol):
    """A run, as far as scaling knows it."""

    scenario: Scenario
    fleet: Fleet
    loop: Loop
    bus: Bus
    zero_ms: float
    instances: dict[str, SimulatedInstance]

    def start_instance(self, name: str, *, cold_start_ms: float | None = None) -> None: ...

    def stop_instance(self, name: str) -> None: ...


def scaled(fleet: Fleet, spec: ScalingSpec) -> Fleet:
    """The fleet as a run scales it: plans are on or off, and every site with instances has an actuator."""
    mode = "on" if spec.kind == "plan" else "off"
    planning = msgspec.convert({**msgspec.to_builtins(fleet.planning), "mode": mode}, type=type(fleet.planning))
    sites = {
        name: msgspec.structs.replace(site, actuator=Actuator(kind="emulator") if site.instances else None)
        for name, site in fleet.sites.items()
    }
    return msgspec.structs.replace(fleet, planning=planning, sites=sites)


class Scaling:
    """The agents of all sites, as far as they start and stop replicas."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.spec = stage.scenario.scaling
        self.agents = {name: _Agent(stage, name) for name, site in stage.fleet.sites.items() if site.instances}
        for agent in self.agents.values():
            stage.bus.join(agent.node)
        self._start()
        if self.spec.kind == "reactive":
            self._wishes: dict[tuple[str, str, str], list[tuple[float, int]]] = {}
            self._revision = 0
            self.stage.loop.at(self.stage.zero_ms, self._react)

    def _start(self) -> None:
        """Before the first arrival: so many replicas of each pool run, the others never did."""
        for site in self.agents:
            for (model, version), names in self.stage.fleet.pools(site).items():
                running = self.spec.begin.get(f"{site}/{model}@{version}", self.spec.begin.get(f"{site}/{model}", 1))
                for name in names[running:]:
                    self.stage.stop_instance(name)

    def reports(
        self, site: str, reports: list[CapacityReported], now_ms: float, late_ms: float
    ) -> list[CapacityReported]:
        """What a site's agent says: of what it has started and stopped, beside what engines say."""
        return self.agents[site].sample(reports, now_ms, late_ms)

    # ------------------------------------------------------------------ the reactive autoscaler

    def _react(self) -> None:
        loop, scale = self.stage.loop, self.stage.fleet.planning.time_scale
        for site, agent in self.agents.items():
            by_model: dict[str, list[Target]] = {}
            for (model, version), names in self.stage.fleet.pools(site).items():
                by_model.setdefault(model, []).append(Target(version=version, replicas=self._wish(site, model, names)))
            for model, targets in by_model.items():
                self._revision += 1
                plan = PlanIssued(
                    id=f"reactive:{self._revision}", site=site, model=model, revision=self._revision,
                    targets=tuple(targets),
                )  # fmt: skip
                agent.handle(plan, loop.now_ms)
        loop.at(loop.now_ms + 1000.0 * self.spec.every_s / scale, self._react)

    def _wish(self, site: str, model: str, names: Sequence[str]) -> int:
        spec, now_ms = self.spec, self.stage.loop.now_ms
        scale = self.stage.fleet.planning.time_scale
        mine = [self.stage.instances[name] for name in names]
        current = sum(not one.stopped and not one.draining for one in mine)
        ready = [one for one in mine if one.up and not one.draining]
        room = sum(one.profile.max_sequences for one in ready)
        inside = sum(one.open for one in ready)
        held = self.stage.bus.nodes[f"tokenpilot@{site}"].core.gauges()["held_requests"]  # type: ignore[attr-defined]
        waiting = sum(count for labels, count in held.items() if dict(labels).get("model") == model)
        wish = current
        if room:
            ratio = (inside + waiting) / room / spec.target
            if abs(ratio - 1.0) > 0.1:
                wish = math.ceil(len(ready) * ratio)
        # like the original it never begins from nothing
        wish = max(spec.at_least if current else 0, min(len(names), wish))
        key = (site, model, names[0])
        kept = [one for one in self._wishes.get(key, []) if one[0] > now_ms - 1000.0 * spec.down_after_s / scale]
        self._wishes[key] = [*kept, (now_ms, wish)]
        return max(wish, min(current, max(count for _, count in self._wishes[key])))


class _Agent:
    """One site's agent: the live actuation on simulated replicas."""

    def __init__(self, stage: Stage, site: str) -> None:
        self.stage, self.site = stage, site
        declared = stage.fleet.sites[site]
        self.actuation = Actuation(site, dict(declared.instances), declared.actuator, stage.fleet.planning)
        self.node = Node(f"siteagent@{site}", "siteagent", site, self, stage.bus)
        self.revision = 0

    # the core's interface

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """A plan."""
        if isinstance(message, PlanIssued) and message.site == self.site and self.actuation.plan(message, now_ms):
            self._act(now_ms)
            return self._applied(now_ms)
        return []

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Everything happens with samples."""
        return []

    def sample(self, reports: list[CapacityReported], now_ms: float, late_ms: float) -> list[CapacityReported]:
        """Observe, act, and say what is not running beside what is."""
        said = {report.instance: report for report in reports}
        for name in self.actuation.hands:
            instance = self.stage.instances[name]
            up = instance.up and not instance.stopped
            self.actuation.observe(
                name, ready=up, reachable=up, open_requests=instance.open if up else None, now_ms=now_ms
            )
        self._act(now_ms)
        self.node.perform(self._applied(now_ms))
        found = []
        for name, hand in self.actuation.hands.items():
            instance = self.stage.instances[name]
            report = said.get(name)
            if report is None:
                if not instance.stopped or (hand.state == "untouched" and not self.actuation.plans):
                    continue  # its agent is silent, by a fault; or nobody scales here
                report = instance.report(now_ms, late_ms)
            ready, reason = self.actuation.verdict(name, report.ready, report.reason)
            if instance.stopped:
                ready, reason = False, "stopped"
            draining = reason == "draining"
            found.append(msgspec.structs.replace(report, ready=ready, reason=reason, draining=draining))
        return found

    def _act(self, now_ms: float) -> None:
        for act in list(self.actuation.act(now_ms)):
            declared = self.actuation.hands[act.instance].declared
            if act.action == "start":
                cold_ms = 1000.0 * self.actuation.cold_start_s(declared)
                self.stage.start_instance(act.instance, cold_start_ms=cold_ms)
            else:
                self.stage.stop_instance(act.instance)
            self.actuation.done(act.instance, act.action, ok=True, detail="", now_ms=now_ms)

    def _applied(self, now_ms: float) -> list[Effect]:
        said = [self.actuation.applied(model, now_ms) for model in self.actuation.plans]
        return [Publish(one) for one in said if one is not None]


def solver(stage: Stage, name: str) -> Any:
    """What performs FleetMind's wish for a plan: at once, which in virtual time costs nothing."""

    def perform(effect: Effect) -> None:
        if not isinstance(effect, MakePlan):
            raise TypeError(f"nobody performs {type(effect).__name__}")
        stage.loop.at(stage.loop.now_ms, stage.bus.nodes[name].hear, effect.solve())

    return perform


def teach(core: FleetMind, fleet: Fleet, arrivals: Iterable[Arrival], before_ms: float, zero_ms: float) -> None:
    """Let FleetMind's forecast have lived through these arrivals, `before_ms` before their own time.

    What an operator's fleet has after a day: how many came when, not what became of them.
    """
    planning = msgspec.structs.replace(fleet.planning, mode="on")
    fleet = msgspec.structs.replace(fleet, planning=planning)
    for arrival in sorted(arrivals, key=lambda one: one.at_ms):
        resolved = fleet.resolve_model(arrival.model)
        model, version = resolved if resolved is not None else (arrival.model, "")
        ask = Ask(
            request_id=f"before-{arrival.index}",
            gateway="",
            gateway_incarnation="",
            entry=arrival.entry,
            entry_zone=fleet.sites[arrival.entry].zone,
            tenant=arrival.tenant,
            service_class=arrival.service_class,
            model_asked=arrival.model,
            model=model,
            version=version,
            input_tokens=arrival.input_tokens,
            received_unix_ms=0,
            patience_ms=0.0,
        )
        at_ms = zero_ms + arrival.at_ms - before_ms
        list(core.long.hear(fleet, core.state.capacity, AdmissionDecided(id="", ask=ask, admitted=True), at_ms))
