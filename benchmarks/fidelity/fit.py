"""Measures a real engine through its OpenAI API and fits the engine model's constants to it.

Decides which requests are sent, which half of them the constants are fitted to, and when constants are good. The other
half is predicted: the engine model is driven with the very arrivals that the engine had, and every request's TTFT and
TPOT are compared. Halves are whole segments, each drained before the next: a held-out request never shared a step with
one that was fitted to. Refuses to know what the engine runs on: the server's URL is all that it needs.

The fit starts from straight lines (TTFT over uncached prompt tokens, TPOT of a lone sequence) and lowers the mean
absolute log error of both figures by the simplex method of Nelder and Mead (1965) in the logarithms of the constants,
so that none can become negative and a factor counts the same in both directions.
"""

import asyncio
import gzip
import math
import random
import re
import statistics
import sys
from array import array
from collections.abc import Callable, Hashable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from benchmarks.fidelity.sending import Sent, encode, get_text, send_all
from tokenfleet.engine_model import Engine, Phase, Profile, block_hashes

Half = Literal["fit", "held"]
#: kind of segment, half, predicted and measured TTFT, predicted and measured TPOT, ms
Point = tuple[str, str, float, float, float | None, float | None]

#: ids of prompt tokens: ordinary ones in any vocabulary
_IDS = (100, 1000)
#: prompt lengths of lone requests, tokens, and what they generate
_LADDER = (32, 64, 128, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
_LONE_OUTPUT = (8, 32)
#: requests at once, their prompts and outputs
_BURSTS = ((2, 64, 64), (4, 64, 64), (8, 64, 64), (4, 512, 32), (8, 256, 48))
#: share of the engine's time that the open segments ask for, by the straight lines' reckoning
LOADS = (0.35, 0.7)
#: pause between segments, ms: the engine is idle then
_PAUSE_MS = 500.0
#: constants that are fitted, in the order of the vectors
FITTED = (
    "t_fix_ms",
    "t_w_ms",
    "c_us_per_token",
    "a_ns_per_pair",
    "k_ns_per_kv_token",
    "per_sequence_us",
    "api_delay_ms",
)
#: no single request counts for more than an error of this factor
_WORST = math.log(4.0)


class FitError(RuntimeError):
    """The server could not be measured, or what it said cannot be fitted."""


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """What the engine was started with: facts, not fitted."""

    token_budget: int
    max_sequences: int
    block_tokens: int
    kv_tokens: int
    max_model_len: int
    scheduling: Literal["fcfs", "priority"] = "fcfs"


class Wanted(msgspec.Struct, frozen=True, kw_only=True):
    """One request to be made: `shared` tokens that all of its group begin with, then `own` ones."""

    group: int = 0
    shared: int = 0
    own: int
    output: int
    at_ms: float = 0.0
    after_last_ms: float | None = None


class Segment(msgspec.Struct, kw_only=True):
    """Requests that are sent with nothing else in the engine."""

    kind: Literal["lone", "burst", "open"]
    half: Half
    seed: int
    wanted: list[Wanted]
    sent: list[Sent] = []

    def tokens(self, index: int) -> list[int]:
        """The prompt of a request."""
        one = self.wanted[index]
        shared = random.Random(f"{self.seed} group {one.group}").choices(range(*_IDS), k=one.shared)
        return shared + random.Random(f"{self.seed} own {index}").choices(range(*_IDS), k=one.own)


class Figures(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of predictions: |predicted / measured - 1|."""

    requests: int
    ttft_median: float
    ttft_p90: float
    tpot_median: float
    tpot_p90: float


class Fitted(msgspec.Struct, frozen=True, kw_only=True):
    """What a fit found."""

    profile: Profile
    scheduling: str
    #: of both halves, and of the held-out half by kind of segment
    fit: Figures
    held: Figures
    held_by_kind: dict[str, Figures]
    #: mean prompt tokens per request found in the cache: measured (None: not said) and predicted
    cached_measured: float | None
    cached_predicted: float
    #: every request
    points: list[Point]


# ── what is sent ────────────────────────────────────────────────────────────────────────────────────────────────────


def lone(half: Half, seed: int, limits: Limits) -> Segment:
    """One after the other: every length cold, then some again from the cache."""
    dice = random.Random(f"lone {seed}")
    lengths = [n for n in _LADDER if n + max(_LONE_OUTPUT) < limits.max_model_len and 2 * n < limits.kv_tokens]
    wanted = []
    for place, length in enumerate(lengths):
        # Lengths between the rungs, so that the halves do not ask the same.
        tokens = max(8, round(length * dice.uniform(0.8, 1.2)))
        output = _LONE_OUTPUT[place % 2]
        wanted += [
            Wanted(group=place, shared=tokens, own=4, output=output, after_last_ms=dice.uniform(40, 120))
            for _ in range(2)
        ]
    return Segment(kind="lone", half=half, seed=seed, wanted=wanted)


def bursts(half: Half, seed: int, limits: Limits) -> list[Segment]:
    """Several at the same moment."""
    found = []
    for number, (count, prompt, output) in enumerate(_BURSTS):
        own = min(prompt, limits.kv_tokens // (2 * count) - output, limits.max_model_len - output - 1)
        if own < 8:
            continue
        wanted = [Wanted(own=own, output=output) for _ in range(count)]
        found.append(Segment(kind="burst", half=half, seed=seed + number, wanted=wanted))
    return found


def opened(half: Half, seed: int, limits: Limits, rate_per_s: float, seconds: float) -> Segment:
    """Poisson arrivals, half of them with a long common beginning, lengths spread widely."""
    dice = random.Random(f"open {seed}")
    longest = min(limits.max_model_len, limits.kv_tokens // 3) - 200
    wanted: list[Wanted] = []
    at_ms = 0.0
    while True:
        at_ms += dice.expovariate(rate_per_s) * 1000
        if at_ms > seconds * 1000:
            break
        group = dice.randrange(4)
        shared = min(longest // 2, 256 * (1 + group)) if dice.random() < 0.5 else 0
        own = min(longest // 2, max(8, round(dice.lognormvariate(math.log(150), 0.8))))
        output = min(128, max(2, round(dice.lognormvariate(math.log(24), 0.7))))
        wanted.append(Wanted(group=group, shared=shared, own=own, output=output, at_ms=at_ms))
    return Segment(kind="open", half=half, seed=seed, wanted=wanted)


async def play(url: str, model: str, segment: Segment) -> None:
    """Send a segment and wait for its end. Raises `FitError` when a request fails: the others' times mean nothing."""
    for index, one in enumerate(segment.wanted):
        body = {
            "model": model,
            "prompt": segment.tokens(index),
            "max_tokens": one.output,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        segment.sent.append(Sent(index=index, body=encode(body), at_ms=one.at_ms, after_last_ms=one.after_last_ms))
    await send_all(f"{url.rstrip('/')}/completions", segment.sent)
    for sent in segment.sent:
        if sent.problem:
            raise FitError(f"a request of {len(segment.tokens(sent.index))} tokens failed: {sent.problem}")


async def measure(
    url: str, model: str, limits: Limits, *, seconds: float, seed: int, say: Callable[[str], None]
) -> list[Segment]:
    """Both halves of all segments, in turns; loads follow from the first lone segment."""
    warm = Segment(kind="lone", half="fit", seed=seed - 1, wanted=[Wanted(own=200, output=8, after_last_ms=10)] * 3)
    await play(url, model, warm)
    halves: tuple[Half, Half] = ("fit", "held")
    found: list[Segment] = []
    for number, half in enumerate(halves):
        say(f"one request at a time ({half})")
        found.append(lone(half, seed + 1000 * number, limits))
        await play(url, model, found[-1])
    say("several at once")
    by_half = (bursts(half, seed + 1000 * number + 100, limits) for number, half in enumerate(halves))
    for turn in zip(*by_half, strict=True):
        for segment in turn:
            found.append(segment)
            await play(url, model, segment)
    line = straight_lines(found[0])
    for share in LOADS:
        for number, half in enumerate(halves):
            segment_seed = seed + 1000 * number + round(share * 100) + 200
            probe = opened(half, segment_seed, limits, 50.0, 60.0).wanted
            new = statistics.fmean(one.own + 0.1 * one.shared for one in probe)
            output = statistics.fmean(one.output for one in probe)
            # Beside each other decodes share their steps: a third of a lone sequence's time each.
            work_ms = new * line.ms_per_token + output * line.tpot_ms / 3
            segment = opened(half, segment_seed, limits, share * 1000 / work_ms, seconds)
            say(f"open loop at {len(segment.wanted) / seconds:.2f} requests/s for {seconds:.0f} s ({half})")
            found.append(segment)
            await play(url, model, segment)
    return found


# ── what the model says ─────────────────────────────────────────────────────────────────────────────────────────────


class Predicted(msgspec.Struct):
    """One request in the model, ms of the segment's clock."""

    first_ms: float = math.inf
    last_ms: float = math.inf
    cached_tokens: int = 0

    def tpot_ms(self, output: int) -> float | None:
        """Mean time per token after the first."""
        return (self.last_ms - self.first_ms) / (output - 1) if output > 1 else None


class Replay:
    """The segments, ready to be driven through an engine model any number of times."""

    def __init__(self, segments: Sequence[Segment], limits: Limits) -> None:
        self.limits = limits
        #: (sent, prompt tokens, output tokens, block names) by segment
        self.asked: list[list[tuple[float, int, int, list[bytes]]]] = []
        for segment in segments:
            asked = []
            for sent in segment.sent:
                tokens = array("H", segment.tokens(sent.index)).tobytes()
                prompt = sent.prompt_tokens or len(tokens) // 2
                asked.append((sent.sent_ms, prompt, sent.output_tokens, block_hashes(tokens, 2 * limits.block_tokens)))
            self.asked.append(asked)

    def run(self, profile: Profile) -> list[list[Predicted]]:
        """Every request's times by segment, the cache kept between segments."""
        engine = Engine(profile, scheduling=self.limits.scheduling)
        found: list[list[Predicted]] = []
        zero_ms = 0.0
        for number, asked in enumerate(self.asked):
            one = [Predicted() for _ in asked]
            zero_ms = drive(engine, asked, one, zero_ms, str(number)) + _PAUSE_MS
            found.append(one)
        return found


def drive(
    engine: Engine,
    asked: Sequence[tuple[float, int, int, Sequence[Hashable]]],
    into: list[Predicted],
    zero_ms: float,
    name: str,
) -> float:
    """Give an engine its arrivals on its own clock, from `zero_ms` on, until it is idle; returns that time."""
    index, now_ms, count = 0, zero_ms, len(asked)
    while True:
        step = engine.stepping
        due_ms = step.end_ms if step is not None else engine.ready_at_ms
        arrival_ms = zero_ms + asked[index][0] if index < count else None
        if arrival_ms is not None and (due_ms is None or arrival_ms <= due_ms):
            now_ms = max(now_ms, arrival_ms)
            _, prompt, output, names = asked[index]
            engine.submit(
                f"{name}.{index}",
                prompt_tokens=prompt,
                output_tokens=output,
                now_ms=now_ms,
                block_hashes=names,
                owner=into[index],
            )
            index += 1
            continue
        if due_ms is None:
            return now_ms
        now_ms = max(now_ms, due_ms)
        if step is not None:
            for sequence in engine.finish_step(now_ms):
                if sequence.generated == 1:
                    sequence.owner.first_ms = now_ms - zero_ms
                if sequence.phase is Phase.FINISHED:
                    sequence.owner.last_ms = now_ms - zero_ms
                    sequence.owner.cached_tokens = sequence.cached_tokens
        engine.next_run(now_ms)


# ── the fit ─────────────────────────────────────────────────────────────────────────────────────────────────────────


class Lines(msgspec.Struct, frozen=True):
    """What lone requests show at sight."""

    #: TTFT = fixed + per token of uncached prompt
    fixed_ms: float
    ms_per_token: float
    tpot_ms: float


def straight_lines(segment: Segment) -> Lines:
    """Least squares over the lone requests. Raises `FitError` when more tokens do not take longer."""
    points = []
    for index, sent in enumerate(segment.sent):
        if sent.ttft_ms is None:
            continue
        # Every prompt is sent twice: the second time its whole blocks are cached, if the engine caches at all.
        cached = sent.cached_tokens
        if cached is None:
            cached = segment.wanted[index].shared if index % 2 else 0
        points.append((float(sent.prompt_tokens - cached), sent.ttft_ms))
    mean_x = statistics.fmean(x for x, _ in points)
    mean_y = statistics.fmean(y for _, y in points)
    spread = sum((x - mean_x) ** 2 for x, _ in points)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in points) / spread if spread else 0.0
    if slope <= 0:
        raise FitError("longer prompts did not take longer: the machine is too busy, or prompts are too short")
    tpots = [sent.tpot_ms for sent in segment.sent if sent.tpot_ms]
    return Lines(max(0.5, mean_y - slope * mean_x), slope, statistics.median(tpots))


def first_guess(name: str, lines: Lines, limits: Limits) -> Profile:
    """Constants from the straight lines; how a step's time divides is left to the fit."""
    return Profile(
        name=name,
        t_fix_ms=max(0.05, 0.5 * lines.tpot_ms),
        t_w_ms=max(0.05, 0.4 * lines.tpot_ms),
        c_us_per_token=0.9 * lines.ms_per_token * 1000,
        a_ns_per_pair=0.1 * lines.ms_per_token * 1e6 / 1000,
        k_ns_per_kv_token=0.1 * lines.tpot_ms * 1e6 / 500,
        per_sequence_us=max(4.0, 100 * lines.tpot_ms),
        api_delay_ms=max(0.2, lines.fixed_ms - lines.tpot_ms),
        token_budget=limits.token_budget,
        max_sequences=limits.max_sequences,
        block_tokens=limits.block_tokens,
        kv_tokens=limits.kv_tokens,
    )


def pairs(segments: Sequence[Segment], found: list[list[Predicted]]) -> list[Point]:
    """Predicted beside measured, for every request."""
    rows: list[Point] = []
    for segment, predicted in zip(segments, found, strict=True):
        for sent, one in zip(segment.sent, predicted, strict=True):
            assert sent.ttft_ms is not None
            tpot_ms = one.tpot_ms(sent.output_tokens)
            rows.append((segment.kind, segment.half, one.first_ms - sent.sent_ms, sent.ttft_ms, tpot_ms, sent.tpot_ms))
    return rows


def loss(rows: Sequence[Point]) -> float:
    """Mean absolute log error of TTFT and TPOT together; kinds of segments count alike."""
    by_kind: dict[str, list[float]] = {}
    for kind, _, ttft, seen, tpot, seen_tpot in rows:
        errors = by_kind.setdefault(kind, [])
        errors.append(min(_WORST, abs(math.log(max(1e-3, ttft) / max(1e-3, seen)))))
        if tpot is not None and seen_tpot:
            errors.append(min(_WORST, abs(math.log(max(1e-3, tpot) / seen_tpot))))
    return statistics.fmean(statistics.fmean(errors) for errors in by_kind.values())


def fit(
    segments: Sequence[Segment], limits: Limits, *, name: str, rounds: int = 500, say: Callable[[str], None] = print
) -> Fitted:
    """Constants from the `fit` half; errors of both."""
    fitted = [segment for segment in segments if segment.half == "fit"]
    guess = first_guess(name, straight_lines(fitted[0]), limits)
    replay = Replay(fitted, limits)

    def of(vector: Sequence[float]) -> Profile:
        return msgspec.structs.replace(
            guess, **{field: math.exp(value) for field, value in zip(FITTED, vector, strict=True)}
        )

    def judged(vector: Sequence[float]) -> float:
        return loss(pairs(fitted, replay.run(of(vector))))

    start = [math.log(getattr(guess, field)) for field in FITTED]
    say(f"fitting; the straight lines alone: loss {judged(start):.3f}")
    best, lowest = simplex(judged, start, rounds=rounds)
    # Once more around what was found: a simplex may have collapsed too early.
    best, lowest = simplex(judged, best, rounds=rounds // 2, step=0.3)
    say(f"fitted: loss {lowest:.3f}")
    rounded = {field: _short(math.exp(value)) for field, value in zip(FITTED, best, strict=True)}
    profile = msgspec.structs.replace(of(best), **rounded)
    return judge(segments, limits, profile)


def judge(segments: Sequence[Segment], limits: Limits, profile: Profile) -> Fitted:
    """Errors of a profile's predictions of these segments."""
    predicted = Replay(segments, limits).run(profile)
    rows = pairs(segments, predicted)
    held = [row for row in rows if row[1] == "held"]
    said = [sent.cached_tokens for segment in segments for sent in segment.sent if sent.cached_tokens is not None]
    return Fitted(
        profile=profile,
        scheduling=limits.scheduling,
        fit=figures([row for row in rows if row[1] == "fit"]),
        held=figures(held),
        held_by_kind={kind: figures([r for r in held if r[0] == kind]) for kind in sorted({r[0] for r in held})},
        cached_measured=statistics.fmean(said) if said else None,
        cached_predicted=statistics.fmean(one.cached_tokens for segment in predicted for one in segment),
        points=rows,
    )


def figures(rows: Sequence[Point]) -> Figures:
    """Errors over some requests."""
    ttft = sorted(abs(row[2] / row[3] - 1) for row in rows)
    tpot = sorted(abs(row[4] / row[5] - 1) for row in rows if row[4] is not None and row[5])
    return Figures(
        requests=len(rows),
        ttft_median=statistics.median(ttft),
        ttft_p90=ttft[int(0.9 * (len(ttft) - 1))],
        tpot_median=statistics.median(tpot),
        tpot_p90=tpot[int(0.9 * (len(tpot) - 1))],
    )


def simplex(
    of: Callable[[Sequence[float]], float], start: Sequence[float], *, rounds: int, step: float = 0.7
) -> tuple[list[float], float]:
    """The lowest point that Nelder and Mead's method finds, and its value; at most `rounds` evaluations."""
    points = [list(start)]
    for axis in range(len(start)):
        moved = list(start)
        moved[axis] += step
        points.append(moved)
    valued = sorted((of(point), point) for point in points)
    used = len(valued)
    while used < rounds and valued[-1][0] - valued[0][0] > 1e-5:
        centre = [statistics.fmean(axis) for axis in zip(*(point for _, point in valued[:-1]), strict=True)]
        worst_value, worst = valued[-1]

        def along(factor: float, centre: list[float] = centre, worst: list[float] = worst) -> list[float]:
            return [c + factor * (c - w) for c, w in zip(centre, worst, strict=True)]

        point = along(1.0)
        value = of(point)
        used += 1
        if value < valued[0][0]:
            further = along(2.0)
            used += 1
            if (reached := of(further)) < value:
                point, value = further, reached
        elif value >= valued[-2][0]:
            nearer = along(0.5 if value < worst_value else -0.5)
            reached = of(nearer)
            used += 1
            if reached < min(value, worst_value):
                point, value = nearer, reached
            else:  # towards the best
                best = valued[0][1]
                shrunk = [[b + 0.5 * (p - b) for b, p in zip(best, other, strict=True)] for _, other in valued[1:]]
                valued = sorted([valued[0], *((of(other), other) for other in shrunk)])
                used += len(shrunk)
                continue
        valued[-1] = (value, point)
        valued.sort()
    return valued[0][1], valued[0][0]


# ── what it says ────────────────────────────────────────────────────────────────────────────────────────────────────


def as_toml(profile: Profile, scheduling: str) -> str:
    """The profile as tables of a scenario file."""
    lines = [f"[profiles.{profile.name}]"]
    named = (*FITTED, "kv_tokens", "token_budget", "max_sequences")
    lines += [f"{field} = {getattr(profile, field)!r}" for field in named]
    lines += ["", "[engines]", f"block_tokens = {profile.block_tokens}", f'scheduling = "{scheduling}"']
    return "\n".join(lines)


def table(found: Fitted) -> str:
    """The errors for people."""
    lines = [f"{'':<14} {'requests':>8} {'TTFT median':>12} {'p90':>7} {'TPOT median':>12} {'p90':>7}"]
    rows = [("fitted half", found.fit), ("held-out half", found.held)]
    rows += [(f"  {kind}", one) for kind, one in found.held_by_kind.items()]
    for name, one in rows:
        lines.append(
            f"{name:<14} {one.requests:>8} {one.ttft_median:>12.1%} {one.ttft_p90:>7.1%} "
            f"{one.tpot_median:>12.1%} {one.tpot_p90:>7.1%}"
        )
    said = "not said" if found.cached_measured is None else f"{found.cached_measured:.0f}"
    lines.append(f"prompt tokens from the cache per request: {said} measured, {found.cached_predicted:.0f} predicted")
    return "\n".join(lines)


async def limits_of(base: str, *, token_budget: int, max_sequences: int, kv_tokens: int, block_tokens: int,
                    max_model_len: int, scheduling: Literal["fcfs", "priority"]) -> Limits:  # fmt: skip
    """What was said on the command line, and for what was not, what the engine's own pages say. Raises `FitError`."""
    root = base.rstrip("/").removesuffix("/v1")
    page = await get_text(f"{root}/metrics")
    info = re.search(r"^vllm:cache_config_info\{([^}]*)\}", page, re.MULTILINE)
    said = dict(re.findall(r'(\w+)="([^"]*)"', info[1])) if info else {}
    block = block_tokens or int(said.get("block_size", "0") or 0)
    blocks = said.get("num_gpu_blocks", "")
    tokens = kv_tokens or (block * int(blocks) if blocks.isdigit() else 0)
    if not block or not tokens:
        raise FitError("the engine does not say its KV blocks: give --block-tokens and --kv-tokens")
    models = await get_text(f"{root}/v1/models")
    found = re.search(r'"max_model_len":\s*(\d+)', models)
    length = max_model_len or (int(found[1]) if found else 0)
    if not length:
        raise FitError("the engine does not say its longest sequence: give --max-model-len")
    return Limits(
        token_budget=token_budget,
        max_sequences=max_sequences,
        block_tokens=block,
        kv_tokens=tokens,
        max_model_len=length,
        scheduling=scheduling,
    )


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def say(text: str) -> None:
    """Progress, for people."""
    print(f"fidelity: {text}", file=sys.stderr, flush=True)


def save(path: Path, limits: Limits, segments: Sequence[Segment], found: Fitted | None) -> None:
    """Everything measured, to be fitted again without the engine: JSON, packed where the name ends in .gz."""
    for segment in segments:
        for sent in segment.sent:
            sent.body = b""  # made again from the segment's seed
    fitted = None if found is None else msgspec.structs.replace(found, points=[])
    data = msgspec.json.encode(Saved(limits=limits, segments=list(segments), fitted=fitted))
    path.write_bytes(gzip.compress(data, mtime=0) if path.suffix == ".gz" else data)


def load(path: Path) -> "Saved":
    """What `save` wrote. Raises `FitError`."""
    data = path.read_bytes()
    try:
        return msgspec.json.decode(gzip.decompress(data) if path.suffix == ".gz" else data, type=Saved)
    except (msgspec.DecodeError, gzip.BadGzipFile) as error:
        raise FitError(f"{path}: {error}") from None


class Saved(msgspec.Struct):
    """What `save` wrote."""

    limits: Limits
    segments: list[Segment]
    fitted: Fitted | None = None


def measured(url: str, model: str, limits: Limits, *, seconds: float, seed: int) -> list[Segment]:
    """`measure`, from outside an event loop."""
    return asyncio.run(measure(url, model, limits, seconds=seconds, seed=seed, say=say))
