"""The built-in workload: what a fleet's day is made of, drawn from a seed, so that a replay needs no file.

Decides who asks for what: chats whose turns share an app's system prompt and their own history, long documents asked
about once or twice, tool agents that send their growing history again and again, and batch work in bursts; several
tenants, one of them bound to a zone (its residency is the fleet file's, not ours), two models, one of them asked for in
two versions. Refuses to know sites: where the load lands follows from the fleet's home sites. Pure.

Arrivals are renewal processes of sessions: Gamma gaps, whose coefficient of variation is 1 for Poisson and above it for
bursts (ServeGen, Xiang et al. 2025, finds both among real clients). Sessions start before the window, so that the first
second already carries follow-up turns. Lengths are lognormal and clipped.
"""

import math
import random
from collections.abc import Iterator

import msgspec

from tokenfleet.replay.errors import WorkloadError
from tokenfleet.replay.traces import DEFAULT_BLOCK_TOKENS, Row, Trace

#: sessions that began this long before the window still send turns in it
_BEFORE_S = 60.0


class Length(msgspec.Struct, frozen=True):
    """A lognormal number of tokens: its median, the sigma of its logarithm, and bounds."""

    median: float
    sigma: float
    least: int
    most: int

    def draw(self, dice: random.Random) -> int:
        """One length, tokens."""
        value = self.median * math.exp(self.sigma * dice.gauss(0.0, 1.0))
        return max(self.least, min(self.most, round(value)))


class Stream(msgspec.Struct, frozen=True, kw_only=True):
    """One tenant's requests of one kind."""

    tenant: str
    cls: str
    task: str
    #: what share of all requests this is
    share: float
    #: (model as asked for, weight)
    models: tuple[tuple[str, float], ...]
    #: coefficient of variation of the gaps between sessions
    burstiness: float = 1.0
    #: how many apps, each with a shared opening (system prompt, tool definitions) of so many blocks
    apps: int = 1
    app_blocks: int = 1
    #: turns of a session, uniform between the two
    turns: tuple[int, int] = (1, 1)
    #: tokens that the first turn adds to the app's opening, and every later one to the history
    first: Length
    later: Length
    answer: Length
    #: pause after an answer before the next turn, seconds: a fixed part and the mean of an exponential one
    pause_s: tuple[float, float] = (1.0, 1.0)
    #: a guess of how long an answer takes: turns are planned open-loop
    answer_s: float = 3.0
    deadline_ms: float | None = None

    @property
    def mean_turns(self) -> float:
        """Expected turns of a session."""
        return sum(self.turns) / 2


#: Names are those of the reference fleet.
STREAMS: tuple[Stream, ...] = (
    # An app's assistant: short turns over a shared system prompt; a part of it is pinned to the newer version.
    Stream(
        tenant="studio",
        cls="chat",
        task="assistant",
        share=0.26,
        models=(("chat-8b", 0.75), ("chat-8b@2", 0.25)),
        apps=3,
        app_blocks=2,
        turns=(2, 6),
        first=Length(160, 0.7, 20, 900),
        later=Length(110, 0.7, 20, 700),
        answer=Length(130, 0.6, 16, 420),
        pause_s=(2.0, 6.0),
        answer_s=4.0,
    ),
    # A bank's help desk: its data stays in the zone, and its customers wait for every word.
    Stream(
        tenant="bank",
        cls="interactive",
        task="helpdesk",
        share=0.14,
        models=(("chat-8b", 1.0),),
        apps=2,
        app_blocks=1,
        turns=(1, 4),
        first=Length(140, 0.6, 20, 600),
        later=Length(90, 0.6, 20, 500),
        answer=Length(90, 0.5, 16, 260),
        pause_s=(2.0, 5.0),
        answer_s=3.0,
    ),
    Stream(
        tenant="bank",
        cls="document",
        task="contracts",
        share=0.08,
        models=(("doc-32b", 1.0),),
        app_blocks=1,
        turns=(1, 2),
        first=Length(7000, 0.5, 2000, 20_000),
        later=Length(80, 0.5, 20, 300),
        answer=Length(200, 0.4, 60, 500),
        pause_s=(4.0, 6.0),
        answer_s=8.0,
    ),
    # Coding agents: long tool definitions, a history that grows with every call, hardly a pause between calls.
    Stream(
        tenant="devtools",
        cls="agent",
        task="coding",
        share=0.27,
        models=(("chat-8b@2", 0.5), ("chat-8b", 0.5)),
        burstiness=1.6,
        apps=2,
        app_blocks=5,
        turns=(4, 10),
        first=Length(700, 0.6, 100, 3000),
        later=Length(420, 0.8, 40, 2500),
        answer=Length(80, 0.7, 12, 400),
        pause_s=(0.4, 1.5),
        answer_s=3.0,
    ),
    Stream(
        tenant="research",
        cls="document",
        task="papers",
        share=0.09,
        models=(("doc-32b", 1.0),),
        app_blocks=1,
        turns=(1, 1),
        first=Length(9000, 0.45, 3000, 24_000),
        later=Length(80, 0.5, 20, 300),
        answer=Length(240, 0.4, 60, 600),
    ),
    # Batch work comes in bursts and is wanted by a deadline, not at once.
    Stream(
        tenant="research",
        cls="batch",
        task="labels",
        share=0.1,
        models=(("doc-32b", 0.4), ("chat-8b", 0.6)),
        burstiness=3.0,
        app_blocks=1,
        first=Length(1800, 0.5, 300, 6000),
        later=Length(80, 0.5, 20, 300),
        answer=Length(220, 0.4, 40, 500),
    ),
    Stream(
        tenant="trial",
        cls="chat",
        task="assistant",
        share=0.06,
        models=(("chat-8b", 1.0),),
        app_blocks=1,
        turns=(1, 3),
        first=Length(200, 0.7, 20, 900),
        later=Length(110, 0.7, 20, 700),
        answer=Length(120, 0.6, 16, 400),
        pause_s=(2.0, 6.0),
        answer_s=4.0,
    ),
)

#: requests per second that load the reference fleet beyond what it can keep its promises for
RATE_PER_S = 17.0
DURATION_S = 60.0


def generate(
    *,
    seed: int = 1,
    duration_s: float = DURATION_S,
    rate_per_s: float = RATE_PER_S,
    streams: tuple[Stream, ...] = STREAMS,
) -> Trace:
    """The workload of a seed: about `duration_s` × `rate_per_s` requests, sorted by arrival.

    The same arguments give the same trace. Raises `WorkloadError` for a rate or duration that is not positive.
    """
    if not (math.isfinite(duration_s) and duration_s > 0):
        raise WorkloadError(f"duration must be above 0 s, not {duration_s}")
    if not (math.isfinite(rate_per_s) and rate_per_s > 0):
        raise WorkloadError(f"rate must be above 0 requests/s, not {rate_per_s}")
    if not streams:
        raise WorkloadError("no streams: there is nobody to ask anything")
    total = sum(stream.share for stream in streams)
    rows: list[Row] = []
    ids = _BlockIds()
    for nth, stream in enumerate(streams):
        # A generator per stream: changing one of them leaves the others' arrivals as they were.
        dice = random.Random(f"{seed} {nth} {stream.tenant} {stream.task}")
        sessions_per_s = rate_per_s * stream.share / total / stream.mean_turns
        for number, start_s in enumerate(_starts(dice, sessions_per_s, duration_s, stream)):
            rows += [
                row for row in _session(dice, stream, ids, f"{nth}-{number}", start_s) if 0 <= row.t_s < duration_s
            ]
    if not rows:
        raise WorkloadError(f"{rate_per_s} requests/s over {duration_s} s gave no request")
    rows.sort(key=lambda row: row.t_s)
    return Trace(name=f"builtin-{seed}", rows=tuple(rows))


class _BlockIds:
    """Block ids by what they stand for; an app's opening is the same for all of its sessions."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}

    def of(self, owner: str, nth: int) -> int:
        return self._ids.setdefault((owner, nth), len(self._ids))


def _starts(dice: random.Random, sessions_per_s: float, duration_s: float, stream: Stream) -> Iterator[float]:
    """Session starts from before the window to its end: Gamma gaps with the stream's burstiness.

    Their number is the rate's, not the dice's (all gaps are scaled to fit): two seeds differ in when and in what, and
    offer about the same load.
    """
    before_s = _BEFORE_S if stream.turns[1] > 1 else 0.0
    span_s = before_s + duration_s
    count = math.floor(sessions_per_s * span_s + dice.random())
    shape = 1 / stream.burstiness**2
    gaps = [dice.gammavariate(shape, 1.0) for _ in range(count + 1)]
    scale_s = span_s / sum(gaps)
    at_s = -before_s
    for gap in gaps[:-1]:
        at_s += gap * scale_s
        yield at_s


def _session(dice: random.Random, stream: Stream, ids: _BlockIds, name: str, start_s: float) -> Iterator[Row]:
    """The turns of one session: each sends the whole history again, and a little more."""
    app = f"{stream.tenant}-{stream.task}-{dice.randrange(stream.apps)}"
    model = dice.choices([m for m, _ in stream.models], [weight for _, weight in stream.models])[0]
    tokens = stream.app_blocks * DEFAULT_BLOCK_TOKENS + stream.first.draw(dice)
    at_s = start_s
    for _ in range(dice.randint(*stream.turns)):
        answer = stream.answer.draw(dice)
        yield Row(
            t_s=round(at_s, 4),
            input_tokens=tokens,
            output_tokens=answer,
            blocks=tuple(
                ids.of(app if nth < stream.app_blocks else name, nth)
                for nth in range(-(-tokens // DEFAULT_BLOCK_TOKENS))
            ),
            session=name,
            tenant=stream.tenant,
            model=model,
            app=app,
            kind=stream.task,
            cls=stream.cls,
            task=stream.task,
            deadline_ms=stream.deadline_ms,
        )
        fixed_s, mean_s = stream.pause_s
        at_s += stream.answer_s + fixed_s + dice.expovariate(1 / mean_s)
        tokens += answer + stream.later.draw(dice)
