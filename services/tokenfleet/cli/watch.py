"""`tokenfleet watch WHAT`: the fleet's streams as lines, typed, as they happen.

Needs only msgspec and nats-py, and no more rights than the user `subscriber` has for capacity and goodput.
"""

import argparse
import asyncio
import os
import re
from collections.abc import Callable, Iterable
from datetime import UTC, datetime
from typing import TYPE_CHECKING, Any

from tokenfleet.cli._errors import CommandError, UsageError
from tokenfleet.cli._nats import credentials

if TYPE_CHECKING:
    from tokenfleet.runtime.bus import Bus
    from tokenfleet_schemas.event import Event

#: word of the command line → family
WHAT = {
    "capacity": "capacity",
    "goodput": "goodput",
    "placements": "placement",
    "admissions": "admission",
    "outcomes": "outcome",
}
#: of these the last value of each subject is shown first: it is what holds now
_LATEST = frozenset({"capacity", "goodput"})
#: how long a server may take to answer before the command gives up, seconds
PATIENCE_S = 3.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_HEADER = ("TIME (UTC)", "SITE", "FACT", "WHAT")
#: of every message: shown in other columns, or nobody's business on a terminal
_HIDDEN = frozenset({"type", "id", "cause", "term", "time_unix_ms", "site", "revision"})


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "watch",
        help="show a stream of the fleet as it happens",
        description="Show what the fleet says, a line per message, until Ctrl-C. Capacity and goodput begin with what "
        "holds now, the others with what comes next.",
        epilog="User and password may stand in the URL or in TOKENFLEET_NATS_USER and TOKENFLEET_NATS_PASSWORD. The "
        "site is the one where a fact is captured: of admissions and outcomes the entry, of all others the target.",
    )
    parser.add_argument("what", choices=WHAT, metavar="WHAT", help=", ".join(WHAT))
    parser.add_argument("--site", help="only of this site")
    parser.add_argument("--model", help="only of this model")
    parser.add_argument("--since", type=_seconds, metavar="TIME", help="begin this long ago: 30s, 5m, 2h")
    parser.add_argument("--limit", type=_count, metavar="N", help="end after N messages")
    parser.add_argument("--no-follow", action="store_true", help="end after what is there already")
    parser.add_argument("--nats", metavar="URL", help="nats://[user:password@]host:port (TOKENFLEET_NATS_URL)")
    parser.add_argument("--json", action="store_true", help="print each message as it is, one JSON object a line")


def run(args: argparse.Namespace) -> int:
    with asyncio.Runner() as runner:
        return runner.run(_watch(args))


async def _watch(args: argparse.Namespace) -> int:
    import msgspec

    from tokenfleet.runtime.bus import Bus, BusError
    from tokenfleet.runtime.clock import Clock
    from tokenfleet.runtime.settings import Settings, SettingsError
    from tokenfleet_schemas.routes import stream_of, subject_filter

    try:
        settings = Settings.load()
    except SettingsError as error:
        raise UsageError(str(error)) from None
    settings = msgspec.structs.replace(settings, **credentials(args.nats or settings.nats_url))
    family = WHAT[args.what]
    bus = Bus(settings, Clock(), f"watch-{os.getpid()}")
    try:
        await bus.connect(patience_s=PATIENCE_S)
        await _expect_readable(bus, stream_of(family), settings.nats_user)
        queue: asyncio.Queue[Event] = asyncio.Queue()
        reader = await asyncio.wait_for(
            bus.read(
                subject_filter(family, site=args.site, model=args.model),
                lambda event, _now_ms: queue.put_nowait(event),
                stream=stream_of(family),
                since_s=0 if args.since is None and not args.no_follow else args.since,
                latest=family in _LATEST and args.since is None,
            ),
            PATIENCE_S,
        )
        await _show(queue, reader.caught_up if args.no_follow else None, args)
    except BusError as error:
        raise CommandError(str(error)) from None
    except TimeoutError:
        raise CommandError(f"NATS does not let user {settings.nats_user!r} read {args.what}") from None
    finally:
        await bus.close()
    return 0


async def _expect_readable(bus: "Bus", stream: str, user: str) -> None:
    """A denied request is never answered: find out before waiting for ever."""
    import nats.errors
    import nats.js.errors

    from tokenfleet.runtime.bus import BusError

    try:
        async with asyncio.timeout(PATIENCE_S):
            await bus.js.stream_info(stream)
    except nats.js.errors.NotFoundError:
        raise BusError(f"there is no stream {stream}: is this a TokenFleet server?") from None
    except nats.js.errors.Error as error:
        raise BusError(f"stream {stream}: {error}") from None
    except (nats.errors.Error, TimeoutError):
        raise BusError(f"user {user!r} may not read stream {stream}, or JetStream does not answer") from None


async def _show(queue: "asyncio.Queue[Event]", caught_up: asyncio.Event | None, args: argparse.Namespace) -> None:
    """Print what comes; with `caught_up` only what was there before it was set."""
    from tokenfleet_schemas.codec import encode

    printed = 0
    end = asyncio.ensure_future(caught_up.wait()) if caught_up is not None else None
    try:
        while args.limit is None or printed < args.limit:
            if queue.empty() and end is not None:
                get = asyncio.ensure_future(queue.get())
                await asyncio.wait({get, end}, return_when=asyncio.FIRST_COMPLETED)
                if not get.done():
                    get.cancel()
                    return
                event = get.result()
            else:
                event = await queue.get()
            if args.json:
                print(encode(event).decode(), flush=True)
            else:
                if printed == 0:
                    print(_columns(_HEADER))
                print(line(event), flush=True)
            printed += 1
    finally:
        if end is not None:
            end.cancel()


def line(event: "Event") -> str:
    """One message as one line for people."""
    from tokenfleet_schemas.routes import BY_MESSAGE

    at = datetime.fromtimestamp(event.time_unix_ms / 1000, UTC)
    time = f"{at:%H:%M:%S}.{at.microsecond // 1000:03d}" if event.time_unix_ms else "-"
    say = _WORDS.get(type(event).__name__, _anything)
    words = " ".join(word for word in say(event) if word)
    # a name is whatever somebody wrote into a message: it must not steer the terminal
    return _columns(
        (time, event.site or "-", BY_MESSAGE[type(event)].fact, re.sub(r"[^\x20-\x7e\xa0-\U0010ffff]", "?", words))
    )


def _columns(cells: tuple[str, str, str, str]) -> str:
    return f"{cells[0]:<13} {cells[1]:<8} {cells[2]:<10} {cells[3]}"


def _reported(event: Any) -> Iterable[str]:
    yield f"{event.instance:<16} {event.model}@{event.version or '?'}"
    yield "ready" if event.ready else f"NOT READY ({event.reason})"
    yield f"running {_number(event.running)} waiting {_number(event.waiting)} kv {_percent(event.kv_usage)}"
    if event.sample_age_ms > 2000:
        yield f"sample {event.sample_age_ms / 1000:.1f} s old"


def _probed(event: Any) -> Iterable[str]:
    rate = None if event.bytes_per_s is None else event.bytes_per_s / 1e6
    yield f"to {event.other_site}: rtt {_number(event.rtt_ms, ' ms')} loss {_percent(event.loss)}"
    yield f"{_number(rate, ' MB/s')}"


def _measured(event: Any) -> Iterable[str]:
    yield f"{event.service_class:<12} {event.tenant} {event.model} {event.window_s} s:"
    yield f"goodput {event.goodput_tokens_per_s:.1f} of {event.output_tokens_per_s:.1f} tok/s,"
    yield f"{event.compliant} of {event.offered} complied, ttft p99 {_number(event.ttft_ms.p99, ' ms')}"


def _decided(event: Any) -> Iterable[str]:
    ask = event.ask
    yield f"{ask.request_id} {ask.tenant}/{ask.service_class} {ask.model}@{ask.version} {ask.input_tokens} tok"
    yield "admitted" if event.admitted else f"REFUSED {event.status}"
    yield event.reason
    yield "(fallback)" if event.fallback else ""


def _requested(event: Any) -> Iterable[str]:
    yield f"{event.ask.request_id} {event.ask.model}@{event.ask.version} attempt {event.attempt}"
    yield f"excluded {','.join(event.excluded)}" if event.excluded else ""
    yield f"(fallback of {event.fallback})" if event.fallback else ""


def _assigned(event: Any) -> Iterable[str]:
    yield f"{event.request_id} {event.model}@{event.version} attempt {event.attempt} to {event.instance}"
    yield f"by {event.how}, hit {event.prefix_hit_tokens} tok, predicted ttft {_number(event.predicted_ttft_ms, ' ms')}"


def _held(event: Any) -> Iterable[str]:
    yield f"{event.request_id} {event.model}@{event.version} attempt {event.attempt} for {event.home_instance}"
    yield f"lacks {event.lacks}, predicted wait {event.predicted_wait_ms:.0f} ms"


def _finished(event: Any) -> Iterable[str]:
    yield f"{event.request_id} attempt {event.attempt} {event.outcome}"
    yield f"({event.reason})" if event.reason else ""
    yield f"at {event.served_site}/{event.instance}" if event.instance else ""
    yield f"{event.input_tokens}+{event.output_tokens} tok, ttft {_number(event.times.ttft_ms, ' ms')}"
    yield f"tpot {_number(event.times.tpot_ms, ' ms')}"
    yield "" if event.final else "not final"


def _anything(event: Any) -> Iterable[str]:
    """Its plain fields, as they are called in the contract."""
    for name in event.__struct_fields__:
        value = getattr(event, name)
        if name not in _HIDDEN and isinstance(value, str | int | float) and value not in ("", None):
            yield f"{name}={round(value, 1) if isinstance(value, float) else value}"


_WORDS: dict[str, Callable[[Any], Iterable[str]]] = {
    "CapacityReported": _reported,
    "CapacityProbed": _probed,
    "GoodputMeasured": _measured,
    "AdmissionDecided": _decided,
    "PlacementRequested": _requested,
    "PlacementAssigned": _assigned,
    "PlacementHeld": _held,
    "OutcomeFinished": _finished,
}


def _number(value: float | None, unit: str = "") -> str:
    return "?" if value is None else f"{value:g}{unit}" if isinstance(value, int) else f"{value:.1f}{unit}"


def _percent(value: float | None) -> str:
    return "?" if value is None else f"{value:.0%}"


def _seconds(text: str) -> float:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd]?)", text)
    if match is None:
        raise argparse.ArgumentTypeError(f"{text!r} is no time like 30s, 5m or 2h")
    return float(match[1]) * _UNITS_S[match[2] or "s"]


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number")
    return int(text)


__all__ = ["WHAT", "add", "line", "run"]
