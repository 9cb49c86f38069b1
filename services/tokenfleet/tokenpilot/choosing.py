"""Who could serve a request, at what cost: the candidates of a decision, filtered and scored.

Decides nothing that is said; asks the policies, instance by column, and gives what they found. In a large pool only
the cheapest candidates are named, with room and without: whoever picks needs no others. Refuses to know offices and
messages.
"""

import binascii
from base64 import b64decode

import msgspec
import numpy as np

from tokenfleet import prefix
from tokenfleet.eligibility import Heard
from tokenfleet.tokenpilot import lanes, policy
from tokenfleet.tokenpilot.board import REASONS, Board, Codes, Column, Mask, prefill_rate
from tokenfleet.tokenpilot.desk import INFINITY, Desk
from tokenfleet.tokenpilot.policy import NO_ROOM, Asked, Candidate, Lack, Room, Situation
from tokenfleet.tokenpilot.predictor import Model, bucket, tpot_features, ttft_features
from tokenfleet.tokenpilot.prefix_index import EMPTY, Chain, chain_of
from tokenfleet.tokenpilot.state import Forecast, Load, Pool, Waiting, pairs
from tokenfleet_schemas.placement import PlacementAssigned, PlacementRequested, Work
from tokenfleet_schemas.request import Ask

#: pools up to this size are named in full in every decision
_NAMED_MAX = 16
#: how old the knowledge may be of who was held long enough, and of which sizes arrive, ms
_AGED_MS, _NEEDS_MS = 250.0, 500.0


class Choosing(Desk):
    """See the module."""

    def _consider(
        self, request: PlacementRequested, waiting: Waiting, now_ms: float, *, force: bool = False, only: str = ""
    ) -> tuple[Situation, list[Candidate]]:
        """The situation and its candidates in order of names; `only` is among them whatever it costs."""
        ask = request.ask
        board = self._board(ask.model, now_ms)
        rtt_ms = self.fleet.rtt_ms(ask.entry, self.site) or 0.0
        slack_ms = None if ask.ttft_ms is None else ask.ttft_ms - waiting.elapsed_ms(now_ms) - rtt_ms
        situation = Situation(self.fleet, request, now_ms, self.knobs, slack_ms, force)
        situation.decode_tokens = policy.expected_tokens(ask, self._expected_tokens(ask))
        if not board.names:
            return situation, []
        margin = self.state.margins.get(ask.service_class)
        situation.margin = margin.share if margin is not None else 0.0
        situation.residual = self._residual(ask)
        asked = self._asked(ask, board, situation.decode_tokens)
        codes: Codes | None = None
        for one in self.filters:
            found = one(situation, board)
            if found is not None:
                codes = found if codes is None else np.where(codes == 0, found, codes)
        able = np.ones(len(board.names), np.bool_) if codes is None else codes == 0
        ahead = board.prefill_tokens
        if self._reckons:
            situation.left = ahead = ahead - policy.progress(board, now_ms)
            busy = ahead > board.soon_tokens
        else:
            busy = ahead > 0
        # What does not fit beside the prefill ahead, where there is any.
        over = (asked.prefill_tokens > np.maximum(0.0, board.lookahead_tokens - ahead)) & busy
        least = float(np.minimum.reduce(asked.prefill_tokens))
        pool = self._pool(ask.model, ask.version)
        longest = self._longest(pool, board, ahead, able, least)
        if longest is not None and not self._aged(waiting, least, board, now_ms):
            over |= asked.prefill_tokens > longest
        situation.bound, situation.bound_tokens = self._bound(pool, board, waiting)
        situation.burn_price = self._burn_price(pool, board)
        terms = situation.terms = self.scorer(situation, board, asked)
        roomy = able & ~over
        if asked.lacks_kv is not None:
            roomy &= ~asked.lacks_kv
        if asked.has_place is not None:
            roomy &= asked.has_place
        situation.board, situation.able_rows, situation.roomy_rows = board, able, roomy
        situation.able = int(np.count_nonzero(able))
        ties = board.ties(ask.request_id)
        rows = self._named(situation, terms, ties, only)
        at = np.array(rows, np.intp)
        by_row = zip(*[column[at].tolist() for column in terms.values()], strict=True)
        some = zip(
            rows, by_row, ties[at].tolist(), asked.hit_tokens[at].tolist(), asked.shared_kv_tokens(at), strict=True
        )
        candidates: list[Candidate] = []
        works: dict[tuple[float, float, int | None], Work] = {}
        for row, values, tie, hit, shared in some:
            heard, name, rate = board.heards[row], board.names[row], board.rate.item(row)
            total = heard.report.kv_tokens_total
            kind = hit, shared, total
            work = works.get(kind)
            if work is None:
                work = works[kind] = policy.work_of(ask, int(hit), situation.decode_tokens, total, int(shared))
            load = self.state.load(name)
            candidate = Candidate(name, heard, load, int(hit), work, None if rate != rate else rate, tie=tie)
            if codes is not None and codes[row]:
                candidate.out = REASONS[codes[row]]
            else:
                candidate.lacks = "" if roomy[row] else _lacks(asked, row)
                candidate.terms = dict(zip(terms, values, strict=True))
            candidates.append(candidate)
        return situation, candidates

    def _named(self, situation: Situation, terms: dict[str, Column], ties: Column, only: str) -> list[int]:
        """Rows of the candidates to name: everybody in a small pool, else the cheapest with room and of all."""
        board, able, roomy = situation.board, situation.able_rows, situation.roomy_rows
        assert board is not None
        count = len(board.names)
        if count <= _NAMED_MAX or self._everybody or self.fleet.policy.placement in policy.AT_ONCE:
            return list(range(count))
        preferred = policy.preferences(terms, ties)
        half = max(1, self.knobs.shortlist // 2)
        rows: set[int] = set()
        for among in (roomy,) if np.count_nonzero(roomy) == situation.able else (roomy, able):
            these = among.nonzero()[0]
            if these.size > half:
                these = these[preferred[these].argpartition(half)[:half]]
            rows.update(these.tolist())
        if only in board.row:
            rows.add(board.row[only])
        return sorted(rows)

    def _asked(self, ask: Ask, board: Board, decode_tokens: int) -> Asked:
        chain = self._chain(ask)
        hits = self.index.hit_column(chain, ask.prefix_stride)[board.numbers] if chain.size else None
        if hits is None:
            hits = np.zeros(len(board.names))
        else:
            for name, trust in self.exact.distrusted.items():
                if name in board.row:
                    hits[board.row[name]] *= trust
        prefill = np.maximum(1.0, ask.input_tokens - hits)
        kv_tokens = np.minimum(float(ask.input_tokens + decode_tokens), board.kv_total)
        pinned = self.pins.column(chain, ask.prefix_stride) if chain.size else None
        shared = None if pinned is None else np.minimum(pinned[board.numbers], hits)
        own_kv = kv_tokens if shared is None else np.maximum(0.0, kv_tokens - shared)
        lacks_kv = (own_kv > board.kv_left) & ~board.empty
        has_place = board.places_left > 0
        return Asked(
            hits,
            prefill,
            kv_tokens,
            own_kv,
            None if np.count_nonzero(has_place) == len(board.names) else has_place,
            lacks_kv if np.count_nonzero(lacks_kv) else None,
        )

    def _chain(self, ask: Ask) -> Chain:
        if not ask.prefix:
            return EMPTY
        if self._chain_of[0] == ask.prefix:
            return self._chain_of[1]
        try:
            chain = chain_of(b64decode(ask.prefix, validate=True))
        except (prefix.PrefixError, binascii.Error, ValueError):
            chain = EMPTY  # a foreign publisher's garbage costs that request its affinity, nothing else
        self._chain_of = ask.prefix, chain
        return chain

    def _expected_tokens(self, ask: Ask) -> float:
        known = self.state.lengths.find(ask.tenant, ask.task, ask.model)
        return known.mean_tokens if known is not None else float(self.knobs.prior_decode_tokens)

    # ------------------------------------------------------------------------------------------ what columns mirror

    @property
    def picker(self) -> policy.Picker:
        """The picker given, else the one that belongs to the scorer."""
        return self._picker or policy.PICKERS.get(self.fleet.policy.placement, policy.worth_waiting)

    @property
    def scorer(self) -> policy.Scorer:
        """The scorer given, else the one that the fleet file names; round robin asks for none and gets the simplest."""
        return self._scorer or policy.SCORERS.get(self.fleet.policy.placement, policy.least_work)

    def _board(self, model: str, now_ms: float) -> Board:
        """The columns of a model's instances, up to date."""
        instances = self.state.view.instances(self.site)
        board = self._boards.get(model)
        if board is None or board.fleet is not self.fleet:
            board = self._boards[model] = Board(self.fleet, self.site, self.knobs, self._kv_ahead)
            self._lay_out(model, board, instances, now_ms)
            return board
        dirty = board.dirty | board.watched
        board.dirty = set()
        for name in dirty:
            heard = instances.get(name)
            here = heard is not None and heard.report.model == model
            if here != (name in board.row):
                self._lay_out(model, board, instances, now_ms)
                break
            if heard is not None and here:
                self._mirror(board, name, heard, now_ms)
        return board

    def _lay_out(self, model: str, board: Board, instances: dict[str, Heard], now_ms: float) -> None:
        mine = {name: heard for name, heard in instances.items() if heard.report.model == model}
        board.lay_out(mine)
        for name, heard in mine.items():
            self._mirror(board, name, heard, now_ms)

    def _mirror(self, board: Board, name: str, heard: Heard, now_ms: float) -> None:
        board.set(name, heard, self.state.load(name), self._model(name, heard), self.index.number(name), now_ms)

    def _bound(self, pool: Pool | None, board: Board, waiting: Waiting) -> tuple[Column | None, Column | None]:
        """How many others are bound to each instance, and their prefill; None where nobody is."""
        if pool is None or not pool.bound:
            return None, None
        counts, tokens = np.zeros(len(board.names)), np.zeros(len(board.names))
        for name, count in pool.bound.items():
            row = board.row.get(name)
            if row is not None:
                counts[row], tokens[row] = count, pool.bound_tokens[name]
        held = waiting.held
        if held is not None and held.bound and held.home_instance in board.row:
            row = board.row[held.home_instance]
            counts[row] -= 1
            tokens[row] -= held.work.prefill_tokens
        return counts, tokens

    def _work_ms(self, instance: str, work: Work) -> float:
        """Engine time of a prefill by itself, ms; 0 where nothing is known of the instance."""
        heard = self.state.view.instances(self.site).get(instance)
        if heard is None:
            return 0.0
        _, token_ms, pair_ms, step_ms, _ = self._model(instance, heard).ttft.coefficients()
        steps = work.prefill_tokens / max(1, heard.report.token_budget)
        return token_ms * work.prefill_tokens + pair_ms * pairs(work) + step_ms * steps

    def _forecast(self, assigned: PlacementAssigned, entry: str, now_ms: float) -> Forecast | None:
        """What is predicted of an assignment, by whoever made it: every replica learns the same from its outcome."""
        heard = self.state.view.instances(self.site).get(assigned.instance)
        if heard is None:
            return None
        work, load = assigned.work, self.state.load(assigned.instance)
        model = self._model(assigned.instance, heard)
        budget = float(heard.report.token_budget)
        decoding = float(load.decoding + load.foreign_sequences)
        kv_read = load.decode_kv_tokens()
        room = max(budget / 8.0, budget - decoding)
        done = max(0.0, now_ms - load.anchor_ms) / self._per_token_ms(heard, load, model)
        ahead = load.prefill_tokens - min(done, load.done_max(heard.report.token_budget))
        ahead_pairs = load.pairs * ahead / max(1, load.prefill_tokens)
        own = float(work.prefill_tokens)
        features = ttft_features(ahead, ahead_pairs, own, float(pairs(work)), decoding, kv_read, budget)
        physics_ms = model.ttft.predict(features)
        at = bucket(ahead / room, decoding, float(heard.report.max_sequences or self.knobs.unknown_kv_sequences))
        residual = self.state.residuals.get(model.key)
        said_ms = physics_ms * (1.0 + residual.means[at]) if residual is not None and residual.helps else physics_ms
        rtt_ms = (self.fleet.rtt_ms(entry, self.site) or 0.0) if entry else 0.0
        beside = float(load.sequences + load.foreign_sequences)
        per_token = tpot_features(beside, load.all_kv_tokens(), ahead + own)
        delay_ms = model.ttft.coefficients()[0] + rtt_ms / 2
        stale = now_ms - load.booked_ms > self.knobs.retry_ms
        return Forecast(features, physics_ms, said_ms, at, per_token, rtt_ms, delay_ms, stale)

    @property
    def _reckons(self) -> bool:
        """Whether the pace is learned: then the queue is dead-reckoned between signs of life."""
        return self.fleet.policy.placement == "predicted-latency"

    @property
    def _kv_ahead(self) -> float:
        return self.knobs.kv_lookahead if self._reckons else 0.0

    def _room(self, name: str, now_ms: float) -> Room:
        """Room to offer; none where no request may go at all."""
        if not self._usable(name, now_ms):
            return NO_ROOM
        heard, load = self.state.view.instances(self.site)[name], self.state.load(name)
        done = soon = 0.0
        if self._reckons:
            per_token_ms = self._per_token_ms(heard, load, self._model(name, heard))
            limit = load.done_max(heard.report.token_budget)
            done = min(limit, max(0.0, now_ms - load.anchor_ms) / per_token_ms)
            soon = self.knobs.feedback_ms / per_token_ms
        room = policy.room_of(self.fleet, self.site, heard, load, now_ms, self.knobs, done, soon, self._kv_ahead)
        most = self._longest_there(name, heard, now_ms)
        return room if most == INFINITY else msgspec.structs.replace(room, longest_tokens=int(most))

    def _longest_there(self, name: str, heard: Heard, now_ms: float) -> float:
        """Longest prefill that may begin on one instance; what has waited long enough for others may everywhere."""
        report = heard.report
        pool = self._pool(report.model, report.version)
        if pool is None or not pool.held or not self._reckons or not self.knobs.lanes:
            return INFINITY
        board = self._board(report.model, now_ms)
        known = self._limits.get((report.model, report.version))
        if known is None or known[0] != now_ms:
            able = board.eligible(next(iter(pool.waiting.values())).request.ask, (), now_ms) == 0
            border, needs = self._needed(pool, board, able)
            longest = None
            if border < INFINITY:
                ahead = board.prefill_tokens - policy.progress(board, now_ms)
                longest = lanes.longest(needs, ahead, able)
            if longest is not None:
                longest = np.maximum(longest, self._longest_aged(pool, board, now_ms))
            known = self._limits[report.model, report.version] = now_ms, longest
        return INFINITY if known[1] is None else float(known[1][board.row[name]])

    def _longest_aged(self, pool: Pool, board: Board, now_ms: float) -> float:
        at_ms, tokens = self._aged_tokens.get((pool.model, pool.version), (-INFINITY, 0.0))
        if now_ms - at_ms > _AGED_MS:
            held = (w for w in pool.waiting.values() if w.held is not None)
            sizes = ((w, w.held.work.prefill_tokens) for w in held if w.held is not None)
            tokens = max((float(size) for w, size in sizes if self._aged(w, size, board, now_ms)), default=0.0)
            self._aged_tokens[pool.model, pool.version] = now_ms, tokens
        return tokens

    def _burn_price(self, pool: Pool | None, board: Board) -> float:
        """What burnt compute costs others: nothing while instances are idle anyway, much where every one is busy.

        The work that waits in a queue is busy / (1 - busy) times that in service (M/M/1): each further ms of prefill
        is waited for that often. The knob is its ceiling.
        """
        if pool is None:
            return self.knobs.burn_price
        busy = pool.sizes.busy(len(board.names))
        return self.knobs.burn_price if busy >= 1.0 else min(self.knobs.burn_price, busy / (1.0 - busy))

    def _longest(self, pool: Pool | None, board: Board, ahead: Column, able: Mask, tokens: float) -> Column | None:
        """Longest prefill that may begin on each instance (`lanes`), where one of so many tokens could be too long."""
        if pool is None or not self._reckons or not self.knobs.lanes:
            return None
        border, needs = self._needed(pool, board, able)
        return lanes.longest(needs, ahead, able) if tokens > border else None

    def _needed(self, pool: Pool, board: Board, able: Mask) -> tuple[float, Column]:
        """The smallest size that may be limited, and the instances that what is below each border needs."""
        key, count = (pool.model, pool.version), int(np.count_nonzero(able))
        known = self._needs.get(key)
        if known is None or known[1] != count or pool.sizes.at_ms - known[0] > _NEEDS_MS:
            needs = pool.sizes.needs(count, 1000.0 / float(board.per_token_ms.mean()))
            first = int(np.argmax(needs >= 1.0))
            border = lanes.LONG * float(lanes.EDGES[first]) if needs[first] >= 1.0 else INFINITY
            known = self._needs[key] = pool.sizes.at_ms, count, border, needs
        return known[2], known[3]

    def _aged(self, waiting: Waiting, tokens: float, board: Board, now_ms: float) -> bool:
        """Whether it has been held long enough for others' sake: nobody waits for ever for its lane."""
        elapsed_ms, own_ms = waiting.elapsed_ms(now_ms), tokens * float(board.token_ms.mean())
        due_ms = waiting.request.ask.ttft_ms or 0.0
        return elapsed_ms > max(self.knobs.lanes_patience * own_ms, self.knobs.lanes_slack * due_ms)

    def _room_due_ms(self, name: str, tokens: int, now_ms: float) -> float:
        """When prefill room for so many tokens is there if nobody says anything, our clock; infinity: who knows."""
        heard, load = self.state.view.instances(self.site)[name], self.state.load(name)
        if not self._reckons or not load.prefill_tokens:
            return INFINITY
        per_token_ms = self._per_token_ms(heard, load, self._model(name, heard))
        limit = int(load.lookahead(self.knobs) * heard.report.token_budget) - tokens
        over = load.prefill_tokens - max(limit, self.knobs.feedback_ms / per_token_ms)
        if over > load.done_max(heard.report.token_budget):
            return INFINITY  # a first token comes before that
        due_ms = load.anchor_ms + over * per_token_ms
        return due_ms if due_ms > now_ms else INFINITY

    def _per_token_ms(self, heard: Heard, load: Load, model: Model) -> float:
        """Time per token of the prefill booked there, steps and attention included, as the scorer reckons it."""
        _, token_ms, pair_ms, step_ms, kv_ms = model.ttft.coefficients()
        decoding, budget = load.decoding + load.foreign_sequences, heard.report.token_budget
        room = max(budget / 8.0, budget - decoding)
        attention_ms = pair_ms * load.pairs / max(1, load.prefill_tokens)
        return token_ms + attention_ms + (step_ms + kv_ms * load.decode_kv_tokens() + token_ms * decoding) / room

    def _residual(self, ask: Ask) -> Column | None:
        found = self.state.residuals.get(f"{ask.model} {ask.version}")
        return np.array(found.means) if found is not None and found.helps else None

    def _model(self, instance: str, heard: Heard) -> Model:
        """What was learned of the instance with its present model version."""
        report = heard.report
        key = f"{report.model} {report.version}"
        known = self.state.models.get(instance)
        if known is None or known.key != key:
            rate = prefill_rate(self.fleet, self.site, heard)
            known = Model.of(key, rate, self.knobs.unknown_prefill_tokens_per_s)
            self.state.models[instance] = known
            self._few = None
        return known


def _lacks(asked: Asked, row: int) -> Lack:
    """What an instance without room lacks first."""
    if asked.has_place is not None and not asked.has_place[row]:
        return "sequences"
    return "kv_tokens" if asked.lacks_kv is not None and asked.lacks_kv[row] else "prefill_tokens"
