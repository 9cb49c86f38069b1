"""The site agent's core: samples in, reports out. Knows no HTTP and no clock."""

from collections.abc import Iterable, Iterator
from statistics import median

from tokenfleet.effects import Effect, Note, Publish, WakeAt
from tokenfleet.fleet import Fleet, Instance
from tokenfleet.siteagent import policy
from tokenfleet.siteagent.actuation import Act, Action, Actuation
from tokenfleet.siteagent.settings import Knobs
from tokenfleet.siteagent.state import Actuated, BandwidthTaken, Path, ProbeTaken, Record, Sample
from tokenfleet_schemas.capacity import CapacityProbed, CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.plan import PlanIssued

#: what became of a plan is said again after this, changed or not, ms: a reader may have missed it
APPLIED_MS = 60_000.0


class Actuate(Effect, frozen=True, tag=True):
    """Have an instance started or stopped, and hand the answer back as `Actuated`."""

    instance: str
    action: Action


class SiteAgentCore:
    """Reports an instance at once when its readiness, incarnation or identity changes, else every `report_ms`.

    `began` names this run of the agent; incarnations of engines that do not say when they started are made of it.
    """

    def __init__(self, fleet: Fleet, site: str, *, began: str, knobs: Knobs | None = None) -> None:
        self.fleet = fleet
        self.site = site
        self.knobs = knobs or Knobs()
        self._began = began
        self._wake_ms: float | None = None
        self.paths: dict[str, Path] = {}
        self.records = {name: Record(declared=one) for name, one in fleet.sites[site].instances.items()}
        here = fleet.sites[site]
        self.actuation = Actuation(site, dict(here.instances), here.actuator, fleet.planning)
        self._applied_ms: dict[str, float] = {}

    # --- inputs ---------------------------------------------------------------------------------------------

    def handle(self, message: Event, now_ms: float) -> Iterable[Effect]:
        """A sample, a probe, a plan for this site, or an actuator's answer."""
        if isinstance(message, Sample):
            record = self.records.get(message.instance)
            if record is not None:
                yield from self._sampled(message, record, now_ms)
        elif isinstance(message, ProbeTaken):
            yield from self._probed(message, now_ms)
        elif isinstance(message, BandwidthTaken):
            self._measured_path(message, now_ms)
        elif isinstance(message, PlanIssued) and message.site == self.site:
            if self.actuation.plan(message, now_ms):
                self._applied_ms.pop(message.model, None)
                yield from self._act(now_ms)
        elif isinstance(message, Actuated):
            yield from self._actuated(message, now_ms)
        yield from self._arm(now_ms)

    def wake(self, now_ms: float) -> Iterable[Effect]:
        """Report what has not been reported for a while, its sample aged."""
        self._wake_ms = None
        for name, record in self.records.items():
            yield from self._judge(name, record, now_ms)
            if record.reported_ms is not None and now_ms >= self._due_ms(record):
                yield self._report(name, record, now_ms)
        yield from self._act(now_ms)
        yield from self._arm(now_ms)

    def reconfigure(self, fleet: Fleet, now_ms: float) -> Iterable[Effect]:
        """Take a new fleet file over: what is no longer declared here is reported as draining, once, and forgotten."""
        self.fleet = fleet
        site = fleet.sites.get(self.site)
        declared = site.instances if site is not None else {}
        for name in [name for name in self.records if declared.get(name) != self.records[name].declared]:
            record = self.records.pop(name)
            if name in declared and _same_engine(declared[name], record.declared):
                record.declared = declared[name]
                self.records[name] = record
            elif name not in declared and record.reported_ms is not None:
                record.ready, record.reason = False, policy.DRAINING
                yield self._report(name, record, now_ms)
        for name, one in declared.items():
            if name not in self.records:
                self.records[name] = Record(declared=one)
        self.actuation.reconfigure(dict(declared), site.actuator if site is not None else None, fleet.planning)
        yield from self._act(now_ms)
        yield from self._arm(now_ms)

    def wants_identity(self, instance: str) -> bool:
        """Whether nobody knows what this instance serves (it is new, or began anew)."""
        record = self.records.get(instance)
        return record is not None and record.identity is None

    def gauges(self) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Which instances are ready: for operators."""
        ready: dict[tuple[tuple[str, str], ...], float] = {
            (("instance", name),): float(record.ready) for name, record in self.records.items()
        }
        failing: dict[tuple[tuple[str, str], ...], float] = {
            (("instance", name),): float(failed) for name, failed in self.actuation.failing().items()
        }
        return {"siteagent_instance_ready": ready, "siteagent_actuator_failing": failing}

    # --- instances ------------------------------------------------------------------------------------------

    def _sampled(self, sample: Sample, record: Record, now_ms: float) -> Iterator[Effect]:
        before = (record.incarnation, record.identity)
        record.sampled_ms = now_ms
        if sample.health is None:
            if record.silent_since_ms is None:
                record.silent_since_ms, record.silent_polls = now_ms, 0
            record.silent_polls += 1
            record.refused = sample.failure == "refused"
        else:
            record.silent_since_ms, record.silent_polls, record.refused = None, 0, False
            record.health = sample.health
            if sample.metrics is not None:
                yield from self._measured(sample, record, now_ms)
            if sample.identity is not None:
                record.identity = sample.identity
            record.was_healthy = record.was_healthy or sample.health == 200
        reported_ms = record.reported_ms
        self._observe(sample.instance, record, now_ms)
        yield from self._judge(sample.instance, record, now_ms)
        yield from self._act(now_ms)
        known = record.ready or record.reason
        if not known or record.reported_ms != reported_ms:
            return  # a first poll without an answer (what an earlier agent said still stands), or just said
        changed = before != (record.incarnation, record.identity)
        if record.reported_ms is None or changed or now_ms - record.reported_ms >= self.knobs.report_ms / 2:
            yield self._report(sample.instance, record, now_ms)

    def _measured(self, sample: Sample, record: Record, now_ms: float) -> Iterator[Effect]:
        metrics, before = sample.metrics, record.metrics
        assert metrics is not None
        started = metrics.started_unix_s
        moved = before is not None and before.started_unix_s != started
        backwards = policy.restarted(before, metrics)
        if moved or not record.incarnation:
            record.restarts = 0
        elif backwards:
            record.restarts += 1
        incarnation = f"{started:.3f}" if started is not None else f"agent-{self._began}"
        if record.restarts:
            incarnation += f"-{record.restarts}"
        if incarnation != record.incarnation:
            if record.incarnation:
                yield Note("engine_restarted", {}, {"instance": sample.instance, "incarnation": incarnation}, "warning")
                # what the old process served may not be what the new one does
                record.identity, record.was_healthy = None, False
            record.incarnation = incarnation
            record.warned = ()
            before = None
        if before is None or policy.progressed(before, metrics):
            record.progress_ms, record.entered = (
                now_ms,
                before is None or (metrics.running or 0) > (before.running or 0),
            )
        elif (metrics.running or 0) > (before.running or 0):
            record.entered = True
        record.metrics, record.metrics_ms = metrics, now_ms
        missing = metrics.unknown()
        if missing and missing != record.warned:
            yield Note("metrics_unknown", {}, {"instance": sample.instance, "names": " ".join(missing)}, "warning")
        record.warned = missing

    def _judge(self, name: str, record: Record, now_ms: float) -> Iterator[Effect]:
        """Decide readiness anew; say a change at once."""
        if record.sampled_ms is None:
            return
        said = policy.verdict(record, now_ms, self.knobs, self._max_model_len(record))
        ready, reason = self.actuation.verdict(name, *said)
        if (ready, reason) == (record.ready, record.reason):
            return
        first = record.reported_ms is None
        record.ready, record.reason = ready, reason
        labels = {"reason": reason or "ready"}
        yield Note("readiness_changed", labels, {"instance": name}, "info" if ready or first else "warning")
        yield self._report(name, record, now_ms)

    def _report(self, name: str, record: Record, now_ms: float) -> Publish:
        record.reported_ms = now_ms
        # of the clock, so that it rises over restarts of the agent: a repeated id would be taken for a repeated message
        record.revision = max(record.revision + 1, int(now_ms))
        declared, metrics, identity = record.declared, record.metrics, record.identity
        version = policy.served_version(declared, identity, self.knobs) if identity is not None else ""
        incarnation = record.incarnation or f"agent-{self._began}"
        site = self.fleet.sites.get(self.site)
        return Publish(
            CapacityReported(
                id=f"{name}:{incarnation}:{record.revision}",
                time_unix_ms=int(now_ms),
                site=self.site,
                zone=site.zone if site is not None else "",
                instance=name,
                incarnation=incarnation,
                revision=record.revision,
                model=declared.model,
                version=version,
                ready=record.ready,
                reason=record.reason,
                draining=record.reason == policy.DRAINING,
                endpoint_url=declared.url,
                credential=declared.credential,
                routable_from=declared.routable_from,
                engine=declared.engine,
                engine_version=identity.engine_version if identity is not None else "",
                gpus=declared.gpus,
                max_model_len=self._max_model_len(record) or None,
                running=metrics.running if metrics else None,
                waiting=metrics.waiting if metrics else None,
                kv_tokens_total=(metrics.kv_tokens_total if metrics else None) or declared.kv_tokens or None,
                kv_usage=metrics.kv_usage if metrics else None,
                prompt_tokens_total=metrics.prompt_tokens_total if metrics else None,
                generation_tokens_total=metrics.generation_tokens_total if metrics else None,
                preemptions_total=metrics.preemptions_total if metrics else None,
                token_budget=declared.token_budget,
                max_sequences=declared.max_sequences or None,
                prefill_tokens_per_s=declared.prefill_tokens_per_s or None,
                adapters=policy.adapters(declared, identity) if identity is not None else (),
                sample_age_ms=round(now_ms - record.metrics_ms, 1) if metrics else 0.0,
            )
        )

    def _max_model_len(self, record: Record) -> int:
        declared = record.declared
        for entry in record.identity.served if record.identity is not None else ():
            if entry.name in (declared.model, f"{declared.model}@{declared.version}") and entry.max_model_len:
                return entry.max_model_len
        model = self.fleet.models.get(declared.model)
        return model.max_model_len if model is not None else 0

    # --- network and plans ----------------------------------------------------------------------------------

    def _probed(self, probe: ProbeTaken, now_ms: float) -> Iterator[Effect]:
        path = self.paths.setdefault(probe.other_site, Path())
        path.probes = [*path.probes, probe.rtts_ms][-self.knobs.probe_window :]
        path.revision = max(path.revision + 1, int(now_ms))
        taken = [rtt for rtts in path.probes for rtt in rtts]
        answered = [[rtt for rtt in rtts if rtt is not None] for rtts in path.probes]
        # of one probe the shortest: this process may have been late to look
        shortest = [min(rtts) for rtts in answered if rtts]
        age_ms = now_ms - path.bandwidth_ms
        known = bool(path.bandwidths) and age_ms <= self.knobs.bandwidth_kept_ms
        yield Publish(
            CapacityProbed(
                id=f"probe:{self.site}:{probe.other_site}:{path.revision}",
                time_unix_ms=int(now_ms),
                site=self.site,
                other_site=probe.other_site,
                revision=path.revision,
                rtt_ms=round(median(shortest), 3) if shortest else None,
                loss=round(1.0 - sum(map(len, answered)) / len(taken), 4),
                bytes_per_s=round(max(path.bandwidths)) if known else None,
                bandwidth_age_ms=round(age_ms, 1) if known else None,
            )
        )

    def _measured_path(self, message: BandwidthTaken, now_ms: float) -> None:
        """Of two transfers the better counts: one may have met our own load. A failed one says nothing."""
        if message.bytes_per_s is not None:
            path = self.paths.setdefault(message.other_site, Path())
            path.bandwidths = [*path.bandwidths, message.bytes_per_s][-2:]
            path.bandwidth_ms = now_ms

    def _observe(self, name: str, record: Record, now_ms: float) -> None:
        """Tell the actuation what its plan meets; an engine asleep answers and serves nobody."""
        metrics = record.metrics
        ready, _ = policy.verdict(record, now_ms, self.knobs, self._max_model_len(record))
        inside = None
        if metrics is not None and metrics.running is not None and record.silent_since_ms is None:
            inside = metrics.running + (metrics.waiting or 0)
        reachable = record.silent_since_ms is None or not record.refused
        self.actuation.observe(name, ready=ready, reachable=reachable, open_requests=inside, now_ms=now_ms)

    def _act(self, now_ms: float) -> Iterator[Effect]:
        """Bring what is nearer to what is planned, and say what has become of the plans."""
        for act in list(self.actuation.act(now_ms)):
            yield from self._ask(act)
        for name, record in self.records.items():
            yield from self._judge(name, record, now_ms)
        for model in self.actuation.plans:
            again = now_ms - self._applied_ms.get(model, -APPLIED_MS) >= APPLIED_MS
            applied = self.actuation.applied(model, now_ms, again=again)
            if applied is not None:
                self._applied_ms[model] = now_ms
                yield Publish(applied)

    def _ask(self, act: Act) -> Iterator[Effect]:
        yield Note("actuator_asked", {"action": act.action}, {"instance": act.instance}, "info")
        yield Actuate(act.instance, act.action)

    def _actuated(self, message: Actuated, now_ms: float) -> Iterator[Effect]:
        if not message.ok:
            detail = {"instance": message.instance, "error": message.detail}
            yield Note("actuator_failed", {"action": message.action}, detail, "error")
        self.actuation.done(message.instance, message.action, ok=message.ok, detail=message.detail, now_ms=now_ms)
        yield from self._act(now_ms)

    # --- time -----------------------------------------------------------------------------------------------

    def _due_ms(self, record: Record) -> float:
        """When a report must go out although no sample brought one: a quarter later than samples would."""
        return (record.reported_ms or 0.0) + 1.25 * self.knobs.report_ms

    def _arm(self, now_ms: float) -> Iterator[Effect]:
        due = min((self._due_ms(r) for r in self.records.values() if r.reported_ms is not None), default=None)
        planned_ms = self.actuation.due_ms(now_ms)
        if planned_ms < float("inf"):
            due = planned_ms if due is None else min(due, planned_ms)
        if due is not None and (self._wake_ms is None or due < self._wake_ms):
            self._wake_ms = max(due, now_ms)
            yield WakeAt(self._wake_ms)


def _same_engine(one: Instance, other: Instance) -> bool:
    """Whether two declarations mean the same process serving the same thing."""
    return (one.url, one.engine, one.model, one.version) == (other.url, other.engine, other.model, other.version)
