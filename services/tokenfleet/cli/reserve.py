"""`tokenfleet reserve add|list|cancel`: capacity promised to a tenant or a class in a time window."""

import argparse
import asyncio
import json
import re
import time
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from tokenfleet.cli._errors import CommandError, UsageError
from tokenfleet.cli._nats import connected, follow, present

if TYPE_CHECKING:
    from tokenfleet_schemas.event import Event
    from tokenfleet_schemas.reservation import ReservationRequested, ReservationWithdrawn

#: how long FleetMind may take to answer, seconds: a change of owner included
ANSWER_S = 10.0
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_NAME = re.compile(r"^[a-z0-9][a-z0-9_-]{0,63}$")


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "reserve",
        help="promise capacity to a tenant or a class",
        description="Promise GPUs of a site, running a model, to a tenant or a class for a time. FleetMind grants it "
        "only if the site's GPUs and the model's replicas there cover it beside all other promises. Others borrow what "
        "the holder does not use; it ends by itself.",
        epilog="Takes the bus's admin: TOKENFLEET_NATS_USER and TOKENFLEET_NATS_PASSWORD, or --nats with both in "
        "its URL.",
    )
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    new = actions.add_parser("add", help="ask for a promise, or for other terms of one")
    new.add_argument("name", metavar="NAME", help="small letters, digits, - and _")
    new.add_argument("--site", required=True)
    new.add_argument("--model", required=True)
    new.add_argument("--tenant", default="")
    new.add_argument("--class", dest="service_class", default="", metavar="CLASS")
    new.add_argument("--gpus", type=_gpus, required=True, help="GPU-seconds per second")
    new.add_argument("--from", dest="begin", default="now", metavar="TIME", help="now (default) or 2026-12-01T20:00Z")
    new.add_argument("--until", dest="end", metavar="TIME", help="2026-12-02T00:00Z")
    new.add_argument("--for", dest="length", metavar="TIME", help="instead of --until: 30m, 4h, 2d")
    listing = actions.add_parser("list", help="the promises that stand")
    cancel = actions.add_parser("cancel", help="end a promise before its time")
    cancel.add_argument("name", metavar="NAME")
    for one in (new, listing, cancel):
        one.add_argument("--nats", metavar="URL", help="nats://[user:password@]host:port (TOKENFLEET_NATS_URL)")
        one.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    if args.action == "list":
        return _print(asyncio.run(_standing(args.nats)), args.json)
    if not _NAME.match(args.name):
        raise UsageError(f"{args.name!r} is no usable name: small letters, digits, - and _")
    return asyncio.run(_add(args) if args.action == "add" else _cancel(args))


async def _add(args: argparse.Namespace) -> int:
    from tokenfleet_schemas.reservation import ReservationGranted, ReservationRequested

    if not args.tenant and not args.service_class:
        raise UsageError("name a --tenant, a --class, or both")
    if (args.end is None) == (args.length is None):
        raise UsageError("name either --until or --for")
    begin = datetime.now(UTC) if args.begin == "now" else _time(args.begin)
    end = _time(args.end) if args.end is not None else begin + _length(args.length)
    if end <= begin:
        raise UsageError("it would end before it begins")
    now_ms = int(time.time() * 1000)
    asked = ReservationRequested(
        id=f"reservation:{args.name}:requested:{now_ms}",
        time_unix_ms=now_ms,
        site=args.site,
        reservation=args.name,
        model=args.model,
        tenant=args.tenant,
        service_class=args.service_class,
        gpu_seconds_per_s=args.gpus,
        from_unix_ms=int(begin.timestamp() * 1000),
        until_unix_ms=int(end.timestamp() * 1000),
    )
    answer = await _ask(args.nats, asked)
    granted = isinstance(answer, ReservationGranted)
    reason = "" if granted else str(getattr(answer, "reason", ""))
    if args.json:
        print(json.dumps({"reservation": args.name, "granted": granted, "reason": reason}))
    elif granted:
        print(
            f"{args.name}: granted, {args.gpus:g} GPUs of {args.site} for {args.model}, until {end:%Y-%m-%d %H:%M} UTC"
        )
    if not granted and not args.json:
        raise CommandError(f"{args.name}: refused: {reason}")
    return 0 if granted else 1


async def _cancel(args: argparse.Namespace) -> int:
    from tokenfleet_schemas.reservation import ReservationRevoked, ReservationWithdrawn

    standing = {str(one["reservation"]): one for one in await _standing(args.nats)}
    if args.name not in standing:
        raise CommandError(f"there is no reservation {args.name!r}; `tokenfleet reserve list` shows those that stand")
    now_ms = int(time.time() * 1000)
    asked = ReservationWithdrawn(
        id=f"reservation:{args.name}:withdrawn:{now_ms}",
        time_unix_ms=now_ms,
        site=str(standing[args.name]["site"]),
        reservation=args.name,
        model=str(standing[args.name]["model"]),
    )
    answer = await _ask(args.nats, asked)
    ended = isinstance(answer, ReservationRevoked)
    if args.json:
        print(json.dumps({"reservation": args.name, "cancelled": ended}))
    elif ended:
        print(f"{args.name}: cancelled")
    else:
        raise CommandError(f"{args.name}: not cancelled: {getattr(answer, 'reason', '')}")
    return 0 if ended else 1


async def _ask(url: str | None, asked: "ReservationRequested | ReservationWithdrawn") -> "Event":
    """Say it, and wait for FleetMind's answer. Raises `CommandError` where there is none in time."""
    async with connected(url, "reserve") as bus:
        queue, _ = await follow(bus, "reservation")
        await bus.publish_acked(asked)
        try:
            async with asyncio.timeout(ANSWER_S):
                while True:
                    event = await queue.get()
                    if event.cause == asked.id:
                        return event
        except TimeoutError:
            raise CommandError(
                f"FleetMind has not answered within {ANSWER_S:.0f} s; it will when it runs: `tokenfleet reserve list`"
            ) from None


async def _standing(url: str | None) -> list[dict[str, object]]:
    """What is promised and not over, by name, as the stream has it."""
    from tokenfleet_schemas.reservation import ReservationGranted, ReservationRevoked

    async with connected(url, "reserve") as bus:
        events = await present(bus, "reservation")
    now_ms = time.time() * 1000
    standing: dict[str, ReservationGranted] = {}
    for event in events:
        if isinstance(event, ReservationGranted) and event.until_unix_ms > now_ms:
            standing[event.reservation] = event
        elif isinstance(event, ReservationRevoked):
            known = standing.get(event.reservation)
            if known is not None and known.revision <= event.revision and known.term <= event.term:
                del standing[event.reservation]
    return [
        {
            "reservation": name,
            "site": one.site,
            "model": one.model,
            "tenant": one.tenant,
            "service_class": one.service_class,
            "gpu_seconds_per_s": one.gpu_seconds_per_s,
            "from_unix_ms": one.from_unix_ms,
            "until_unix_ms": one.until_unix_ms,
            "open": one.from_unix_ms <= now_ms,
        }
        for name, one in sorted(standing.items())
    ]


def _print(standing: list[dict[str, object]], as_json: bool) -> int:
    if as_json:
        print(json.dumps({"reservations": standing}))
        return 0
    if not standing:
        print("no reservation stands")
    for one in standing:
        who = " ".join(str(one[key]) for key in ("tenant", "service_class") if one[key])
        begin, end = (
            datetime.fromtimestamp(int(str(one[key])) / 1000, UTC) for key in ("from_unix_ms", "until_unix_ms")
        )
        state = "open" if one["open"] else "to come"
        print(
            f"{one['reservation']}: {one['gpu_seconds_per_s']:g} GPUs of {one['site']} for {one['model']}, {who}, "
            f"{begin:%Y-%m-%d %H:%M} to {end:%Y-%m-%d %H:%M} UTC, {state}"
        )
    return 0


def _gpus(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        found = 0.0
    if not 0 < found < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is no positive number of GPUs")
    return found


def _time(text: str) -> datetime:
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise UsageError(f"{text!r} is no time like 2026-12-01T20:00Z") from None
    if found.tzinfo is None:
        raise UsageError(f"{text!r} needs an offset: 2026-12-01T20:00Z or 2026-12-01T20:00+01:00")
    return found


def _length(text: str) -> timedelta:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([smhd])", text)
    if match is None:
        raise UsageError(f"{text!r} is no length of time like 30m, 4h or 2d")
    return timedelta(seconds=float(match[1]) * _UNITS_S[match[2]])
