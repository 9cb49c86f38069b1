"""Who could serve a request, at what cost: the candidates of a decision, filtered and scored.

Decides nothing that is said; asks the policies and gives what they found. Refuses to know offices and messages.
"""

from tokenfleet import prefix
from tokenfleet.tokenpilot import policy
from tokenfleet.tokenpilot.desk import Desk
from tokenfleet.tokenpilot.policy import Candidate, Situation
from tokenfleet.tokenpilot.state import Waiting
from tokenfleet_schemas.placement import (
    PlacementRequested,
)
from tokenfleet_schemas.request import Ask


class Choosing(Desk):
    """See the module."""

    def _consider(
        self, request: PlacementRequested, waiting: Waiting, now_ms: float, *, force: bool = False
    ) -> tuple[Situation, list[Candidate]]:
        ask, state = request.ask, self.state
        rtt_ms = self.fleet.rtt_ms(ask.entry, self.site) or 0.0
        slack_ms = None if ask.ttft_ms is None else ask.ttft_ms - waiting.elapsed_ms(now_ms) - rtt_ms
        situation = Situation(self.fleet, request, now_ms, self.knobs, slack_ms, force)
        chain = self._chain(ask)
        decode_tokens = self._expected_tokens(ask)
        candidates: list[Candidate] = []
        for name, heard in sorted(state.view.instances(self.site).items()):
            report = heard.report
            if report.model != ask.model:
                continue
            load = state.load(name)
            hit = self.index.hit_tokens(name, chain, ask.prefix_stride) if chain else 0
            work = policy.work_of(ask, hit, decode_tokens, report.kv_tokens_total)
            room = policy.room_of(self.fleet, self.site, heard, load, now_ms, self.knobs)
            rate = policy.prefill_rate(self.fleet, self.site, heard)
            one = Candidate(name, heard, load, room, hit, work, rate)
            one.out = next((why for f in self.filters if (why := f(situation, one))), "")
            one.lacks = "" if one.out else room.lacks(work)
            candidates.append(one)
        self.scorer(situation, [c for c in candidates if not c.out])
        return situation, candidates

    def _chain(self, ask: Ask) -> tuple[bytes, ...]:
        if not ask.prefix:
            return ()
        try:
            return prefix.unpack(ask.prefix)
        except prefix.PrefixError:
            return ()  # a foreign publisher's garbage costs that request its affinity, nothing else

    def _expected_tokens(self, ask: Ask) -> float:
        length = self.state.lengths.get(f"{ask.model} {ask.service_class} {ask.task}")
        return length.mean_tokens if length is not None and length.count else float(self.knobs.prior_decode_tokens)
