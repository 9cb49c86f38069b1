"""The shares' room: what each class of a pool is guaranteed, and what it got.

Says `admission.shared`; refuses to know single requests.
"""

from tokenfleet.slomax import fairness
from tokenfleet.slomax.desk import Desk
from tokenfleet_schemas.admission import AdmissionShared, Share


class Shares(Desk):
    """How much of a pool is whose."""

    def _share(self, now_ms: float) -> None:
        """Say what each class of a pool was guaranteed and got, where something changed."""
        for (site, model, version), pool in self.state.pools.items():
            term = self.offices.term(f"release:{site}")
            if not pool.changed or not term:
                continue
            total = sum(pool.used.values())
            shares = []
            for name, share in fairness.shares_of(self.fleet, pool).items():
                used = pool.used.get(name, 0.0) / total if total else 0.0
                cause = "configured" if not total else "borrowed" if used > share else "lent"
                shares.append(Share(service_class=name, share=share, used=used, held=pool.count(name), cause=cause))
            event = AdmissionShared(
                id=f"{site}:{model}:{version}:shared:{term}:{pool.shared_revision + 1}",
                term=term,
                time_unix_ms=int(now_ms),
                site=site,
                model=model,
                version=version,
                revision=pool.shared_revision + 1,
                shares=tuple(shares),
            )
            self._publish(event)
            self._shared(event, now_ms)

    def _shared(self, message: AdmissionShared, now_ms: float) -> None:
        pool = self.state.pool((message.site, message.model, message.version))
        if message.revision > pool.shared_revision:
            pool.shared_revision, pool.shared_ms = message.revision, now_ms
            pool.used, pool.changed = {}, bool(pool.held)
