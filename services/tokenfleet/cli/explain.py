"""`tokenfleet explain REQUEST`: the road of one request with everybody's reasons, from the ledger and the streams."""

import argparse
import asyncio
import json
import sys
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from tokenfleet.cli import _database
from tokenfleet.cli._errors import CommandError
from tokenfleet.cli.goodput import span_s

if TYPE_CHECKING:
    from tokenfleet.runtime.settings import Settings
    from tokenfleet_schemas.event import Event
    from tokenfleet_schemas.placement import Considered

#: families whose messages name a request
FAMILIES = ("request", "admission", "placement", "outcome")
#: around what the ledger says, for clocks and stragglers, s
_MARGIN_S = 15.0


def add(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    parser = subparsers.add_parser(
        "explain",
        help="the road of one request, with reasons",
        description="What every service decided about a request and why. The streams remember about two hours, the "
        "ledger as long as 'tokenfleet db retain' lets it.",
    )
    parser.add_argument("request", metavar="REQUEST", help="its id (the answer's header x-request-id)")
    parser.add_argument(
        "--since", default="15m", metavar="SPAN", help="how far back to look if the ledger does not say; default: 15m"
    )
    parser.add_argument("--timeout", type=float, default=30.0, metavar="SECONDS", help="for reading; default: 30")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--nats", metavar="URL", help="nats://… (TOKENFLEET_NATS_URL)")
    _database.add_options(parser)


def run(args: argparse.Namespace) -> int:
    import msgspec

    since_s = span_s(args.since)
    settings = _database.settings(args)
    if args.nats:
        settings = msgspec.structs.replace(settings, nats_url=args.nats)
    notes: list[str] = []
    rows: list[dict[str, Any]] = []
    if settings.postgres_url:
        try:
            rows = _database.work(_ledger(settings, args.request))
        except CommandError as error:
            notes.append(f"the ledger could not be read: {error}")
    else:
        notes.append("no ledger: TOKENFLEET_POSTGRES_URL is not set")
    events = asyncio.run(_road(settings, args.request, rows, since_s, args.timeout, notes))
    if not rows and not events:
        raise CommandError("; ".join([f"nothing is known of request {args.request!r}", *notes]))
    if args.json:
        print(
            json.dumps(
                {
                    "request_id": args.request,
                    "attempts": msgspec.to_builtins(rows),
                    "events": [_plain(at_ms, event) for at_ms, event in events],
                    "notes": notes,
                }
            )
        )
        return 0
    for line in lines(args.request, rows, events):
        print(line)
    for note in notes:
        print(f"note: {note}", file=sys.stderr)
    return 0


async def _ledger(settings: "Settings", request_id: str) -> list[dict[str, Any]]:
    from tokenfleet.accountant.report import attempts_of

    async with _database.checked_engine(settings.postgres_url) as engine:
        return await attempts_of(engine, request_id)


async def _road(
    settings: "Settings",
    request_id: str,
    rows: list[dict[str, Any]],
    since_s: float,
    timeout_s: float,
    notes: list[str],
) -> list[tuple[float, "Event"]]:
    """Every message about the request that the streams still have, oldest first, with the time of its capture."""
    import logging
    import time

    from tokenfleet.local.nats import redact
    from tokenfleet.runtime.bus import Bus, BusDown, BusError, Captured
    from tokenfleet.runtime.clock import Clock
    from tokenfleet_schemas import codec
    from tokenfleet_schemas.routes import stream_of, subject_filter

    until_ms = float("inf")
    if rows:
        since_s = max(0.0, time.time() - min(row["received_at"] for row in rows).timestamp()) + _MARGIN_S
        until_ms = max(row["finished_at"] for row in rows).timestamp() * 1000 + _MARGIN_S * 1000
    needle = json.dumps(request_id).encode()
    found: list[tuple[float, Event]] = []

    # what goes wrong is said once, in the notes
    logging.getLogger("tokenfleet").addHandler(logging.NullHandler())
    bus = Bus(settings, Clock(), "explain")
    try:
        try:
            # the client itself would try for ever
            await asyncio.wait_for(bus.connect(), 3.0)
        except TimeoutError:
            raise BusDown(f"no NATS at {redact(settings.nats_url)}") from None
        async with asyncio.timeout(timeout_s):
            for family in FAMILIES:
                past = asyncio.Event()

                def keep(captured: Captured, past: asyncio.Event = past) -> None:
                    if captured.stored_ms > until_ms:
                        past.set()
                    elif needle in captured.data:
                        try:
                            found.append((captured.stored_ms, codec.decode(captured.data)))
                        except codec.ContractError:
                            notes.append(f"a message on {captured.subject} is of another version")

                reader = await bus.read_raw(subject_filter(family), keep, stream=stream_of(family), since_s=since_s)
                waits = [asyncio.create_task(reader.caught_up.wait()), asyncio.create_task(past.wait())]
                try:
                    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
                finally:
                    for wait in waits:
                        wait.cancel()
                await reader.stop()
    except BusError as error:
        notes.append(f"the streams could not be read: {error}")
    except TimeoutError:
        notes.append(f"stopped reading the streams after {timeout_s:g} s; --timeout gives more")
    finally:
        # one that never connected has nothing to flush, and its client no connection to close
        if bus.connected:
            await bus.close()
    about = [(at_ms, event) for at_ms, event in found if _request_of(event) == request_id]
    return sorted(about, key=lambda one: one[0])


def _request_of(event: "Event") -> str:
    ask = getattr(event, "ask", None)
    return str(getattr(event, "request_id", "") or getattr(ask, "request_id", ""))


def _plain(at_ms: float, event: "Event") -> dict[str, Any]:
    """An event as JSON, without the digest that nobody reads."""
    import msgspec

    plain: dict[str, Any] = {"captured_unix_ms": round(at_ms, 1), **msgspec.to_builtins(event)}
    if isinstance(plain.get("ask"), dict):
        plain["ask"].pop("prefix", None)
    return plain


# -- for people ---------------------------------------------------------------------------------------------------


def lines(request_id: str, rows: list[dict[str, Any]], events: list[tuple[float, "Event"]]) -> list[str]:
    """The road as text: when, who, what, why."""
    said = [f"request {request_id}"]
    if events:
        begin_ms = events[0][0]
        for at_ms, event in events:
            what, more = describe(event)
            site = f" @{event.site}" if event.site else ""
            said.append(f"{(at_ms - begin_ms) / 1000:+9.3f} s  {_name(event)}{site}: {what}")
            said += [f"{'':14}{line}" for line in more]
    elif rows:
        said.append("the streams have forgotten it; the ledger says:")
    said += [_ledger_line(row) for row in rows] or ["not in the ledger: still open, or not written yet"]
    return said


def _name(event: "Event") -> str:
    tag = str(type(event).__struct_config__.tag)
    _, family, _, fact = tag.split(".")
    return f"{family}.{fact}"


def describe(event: "Event") -> tuple[str, list[str]]:
    """One event in words, and lines of detail: candidates with what spoke for or against each."""
    from tokenfleet_schemas.admission import AdmissionDecided
    from tokenfleet_schemas.outcome import OutcomeFinished, OutcomeStarted
    from tokenfleet_schemas.placement import (
        PlacementAssigned,
        PlacementDeclined,
        PlacementHeld,
        PlacementRefused,
        PlacementReleased,
        PlacementRequested,
        PlacementWithdrawn,
    )
    from tokenfleet_schemas.request import RequestReceived

    revision = getattr(event, "revision", 0)
    again = f" (revision {revision})" if revision else ""
    match event:
        case RequestReceived(ask=ask):
            objectives = _figures(ttft_ms=ask.ttft_ms, tpot_ms=ask.tpot_ms, e2e_ms=ask.e2e_ms)
            return (
                f"{ask.service_class} of {ask.tenant} for {ask.model}@{ask.version} at {ask.gateway}, "
                f"{ask.input_tokens} tokens in, budget {ask.output_budget_tokens or 'open'}{again}",
                [f"objectives {objectives or 'none'}, patience {ask.patience_ms:.0f} ms"],
            )
        case AdmissionDecided():
            verdict = "admitted" if event.admitted else f"refused with {event.status}"
            return verdict + _because(event.reason) + _fallback(event.fallback) + again, []
        case PlacementRequested():
            return f"asked for an instance{_fallback(event.fallback)}{again}", _considered(event.sites)
        case PlacementHeld():
            waits = _figures(predicted_wait_ms=event.predicted_wait_ms, predicted_own_ms=event.predicted_own_ms)
            return f"held, lacks {event.lacks}, home {event.home_instance}, {waits}{again}", _considered(
                event.candidates
            )
        case PlacementReleased():
            return f"released as number {event.number} for {event.instance}{_because(event.reason)}", []
        case PlacementAssigned():
            prediction = _figures(
                predicted_ttft_ms=event.predicted_ttft_ms, prefix_hit_tokens=event.prefix_hit_tokens or None
            )
            return (
                f"{event.instance} ({event.how}), attempt {event.attempt}{again}" + (prediction and f", {prediction}"),
                _considered(event.candidates),
            )
        case PlacementDeclined():
            return f"the gateway did not use {event.declined}{_because(event.reason)}", []
        case PlacementWithdrawn():
            return f"moved to {event.moved_to}{again}", []
        case PlacementRefused():
            return f"refused with {event.status}{_because(event.reason)} {event.detail}".rstrip(), _considered(
                event.sites
            )
        case OutcomeStarted():
            times = _figures(
                ttft_ms=event.ttft_ms, engine_ttft_ms=event.engine_ttft_ms, predicted_ttft_ms=event.predicted_ttft_ms
            )
            return f"first token from {event.instance} at {event.served_site}, {times}", []
        case OutcomeFinished():
            end = "the end" if event.final else "to be tried again"
            times = _figures(ttft_ms=event.times.ttft_ms, tpot_ms=event.times.tpot_ms, e2e_ms=event.times.e2e_ms)
            return (
                f"attempt {event.attempt} {event.outcome}{_because(event.reason)}, {event.output_tokens} tokens out, "
                f"{times}; {end}",
                [],
            )
        case _:
            return "", []


def _because(reason: str) -> str:
    return f" because of {reason}" if reason else ""


def _fallback(who: bool | str) -> str:
    if not who:
        return ""
    return f" by {who} as a fallback" if isinstance(who, str) else " as a fallback"


def _figures(**values: float | None) -> str:
    """`name value` for what is known; the unit is in the name."""
    return ", ".join(f"{name} {value:g}" for name, value in _rounded(values) if value is not None)


def _rounded(values: dict[str, float | None]) -> Iterable[tuple[str, float | None]]:
    return ((name, None if value is None else round(value, 1)) for name, value in values.items())


def _considered(candidates: "Iterable[Considered]") -> list[str]:
    said = []
    for one in candidates:
        mark = "->" if one.chosen else "  "
        why = f"out: {one.out}" if one.out else ", ".join(f"{name} {value:g}" for name, value in one.terms.items())
        said.append(f"{mark} {one.name}  {why}".rstrip())
    return said


def _ledger_line(row: dict[str, Any]) -> str:
    worth = "compliant" if row["compliant"] else f"missed {row['missed']}" if row["missed"] else row["outcome"]
    where = f" on {row['instance']} at {row['served_site']}" if row["instance"] else ""
    return (
        f"ledger: attempt {row['attempt']}{where}: {row['outcome']}{_because(row['reason'])}, {worth}, "
        f"{row['input_tokens']} tokens in, {row['output_tokens']} out, {row['e2e_ms']:.0f} ms"
        + (f", {row['wasted_tokens']} wasted ({row['wasted_cause']})" if row["wasted_tokens"] else "")
        + ("" if row["final"] else ", tried again")
    )
