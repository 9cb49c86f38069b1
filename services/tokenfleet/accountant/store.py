"""The ledger in Postgres: rows of attempts, exactly once, and the quarantine of what no row could be made of.

Decides what a row holds, what happens when an attempt is already there, and which failures are the event's own fault.
Refuses to know where events come from and when they are acknowledged.

Exactly once is the unique key (request_id, attempt) with the time of receipt, by whose day rows are partitioned and
which is one for all rows of a request: however often, in whatever order and by however many writers an event is
written, the first row stays. Only
`owner_lost`, which was a guess, gives way to the truth: to a row of the same attempt, or to a final row of the same
request; and it is not written where a final row is. Rows go in sorted by key in one statement, so that two writers
wait for each other in the same order instead of deadlocking.
"""

import datetime
import hashlib
from collections.abc import Iterable, Sequence

import msgspec
from sqlalchemy import ColumnElement, DateTime, Text, any_, delete, func, literal, select, text
from sqlalchemy.dialects.postgresql import ARRAY, insert
from sqlalchemy.exc import DBAPIError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from tokenfleet.accountant.policy import OutputMedian, judge
from tokenfleet.database import attempts, is_datas_fault, is_transient, quarantine, uncancelled
from tokenfleet_schemas import codec
from tokenfleet_schemas.outcome import OutcomeFinished

#: of a quarantined payload; an outcome with the longest digest is below 64 KiB
PAYLOAD_BYTES_MAX = 256 * 1024
_SECOND_FINAL = "another attempt of this request is final already"
_EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


class LedgerError(ValueError):
    """No ledger row can be made of this event."""


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """One row of `attempts`, field for field; see `tokenfleet.database.attempts`."""

    request_id: str
    attempt: int
    final: bool
    outcome: str
    reason: str
    status: int
    tenant: str
    service_class: str
    task: str
    model_asked: str
    model: str
    version: str
    model_served: str
    site: str
    served_site: str
    instance: str
    booking: str
    stream: bool
    fallback: bool
    input_tokens: int
    output_tokens: int
    offered_output_tokens: int | None
    offered_estimated: bool
    output_budget_tokens: int | None
    cached_tokens: int | None
    prefix_hit_tokens_predicted: int
    usage_source: str
    request_bytes: int
    response_bytes: int
    received_at: datetime.datetime
    finished_at: datetime.datetime
    queue_ms: float | None
    first_byte_ms: float | None
    ttft_ms: float | None
    tpot_ms: float | None
    e2e_ms: float
    predicted_ttft_ms: float | None
    predicted_tpot_ms: float | None
    ttft_objective_ms: float | None
    tpot_objective_ms: float | None
    e2e_objective_ms: float | None
    finish_reason: str
    compliant: bool
    missed: str
    wasted_tokens: int
    wasted_cause: str
    gateway: str
    gateway_incarnation: str
    event_id: str

    @property
    def key(self) -> tuple[str, int]:
        """What is unique."""
        return self.request_id, self.attempt


class Poison(msgspec.Struct, frozen=True, kw_only=True):
    """An event that no row can be made of."""

    subject: str
    payload: bytes
    reason: str


class Written(msgspec.Struct, kw_only=True):
    """What became of a batch."""

    inserted: int = 0
    #: already there: repeats, and guesses that the truth had overtaken
    duplicates: int = 0
    #: `owner_lost` rows that gave way
    replaced: int = 0
    quarantined: int = 0


def row_of(event: OutcomeFinished, medians: OutputMedian) -> Row:
    """The ledger row of one outcome. Raises `LedgerError` for values that no ledger can hold.

    Negative sizes and durations cannot be; a clock or counter that jumped is clamped to zero.
    """
    verdict = judge(event)
    offered, estimated = medians.offered(event)
    times = event.times
    e2e_ms = max(0.0, times.e2e_ms)
    try:
        received_at = _EPOCH + datetime.timedelta(milliseconds=event.received_unix_ms)
        finished_at = received_at + datetime.timedelta(milliseconds=e2e_ms)
    except (OverflowError, ValueError) as error:
        raise LedgerError(f"impossible time: {error}") from None
    return Row(
        request_id=_text(event.request_id),
        attempt=event.attempt,
        final=event.final,
        outcome=event.outcome,
        reason=_text(event.reason),
        status=event.status,
        tenant=_text(event.tenant),
        service_class=_text(event.service_class),
        task=_text(event.task),
        model_asked=_text(event.model_asked),
        model=_text(event.model),
        version=_text(event.version),
        model_served=_text(event.model_served),
        site=_text(event.site),
        served_site=_text(event.served_site),
        instance=_text(event.instance),
        booking=_text(event.booking),
        stream=event.stream,
        fallback=event.fallback,
        input_tokens=max(0, event.input_tokens),
        output_tokens=max(0, event.output_tokens),
        offered_output_tokens=offered,
        offered_estimated=estimated,
        output_budget_tokens=event.output_budget_tokens,
        cached_tokens=event.cached_tokens,
        prefix_hit_tokens_predicted=event.prefix_hit_tokens_predicted,
        usage_source=event.usage_source,
        request_bytes=event.request_bytes,
        response_bytes=event.response_bytes,
        received_at=received_at,
        finished_at=finished_at,
        queue_ms=_duration(times.queue_ms),
        first_byte_ms=_duration(times.first_byte_ms),
        ttft_ms=_duration(times.ttft_ms),
        tpot_ms=_duration(times.tpot_ms),
        e2e_ms=e2e_ms,
        predicted_ttft_ms=event.predicted_ttft_ms,
        predicted_tpot_ms=event.predicted_tpot_ms,
        ttft_objective_ms=event.ttft_objective_ms,
        tpot_objective_ms=event.tpot_objective_ms,
        e2e_objective_ms=event.e2e_objective_ms,
        finish_reason=_text(event.finish_reason),
        compliant=verdict.compliant,
        missed=",".join(verdict.missed),
        wasted_tokens=max(0, verdict.wasted_tokens),
        wasted_cause=verdict.wasted_cause,
        gateway=_text(event.gateway),
        gateway_incarnation=_text(event.gateway_incarnation),
        event_id=_text(event.id),
    )


def _text(value: str) -> str:
    """A client may name a model with a NUL in it; Postgres' text cannot hold one."""
    return value.replace("\0", "\N{REPLACEMENT CHARACTER}") if "\0" in value else value


def _duration(value_ms: float | None) -> float | None:
    return None if value_ms is None else max(0.0, value_ms)


def read(subject: str, payload: bytes, medians: OutputMedian) -> Row | Poison:
    """One message of the outcome stream as a row, or as poison with the reason."""
    try:
        event = codec.decode(payload)
        if not isinstance(event, OutcomeFinished):
            raise LedgerError(f"{type(event).__name__} is no outcome")
        return row_of(event, medians)
    except (codec.ContractError, LedgerError) as error:
        return Poison(subject=subject, payload=payload, reason=str(error))


# -- writing ------------------------------------------------------------------------------------------------------

_COLUMNS = Row.__struct_fields__
#: one parameter, whatever the number of rows: no statement is compiled twice
_INSERT = text(
    f"""
    INSERT INTO attempts ({", ".join(_COLUMNS)})
    SELECT {", ".join(_COLUMNS)} FROM json_populate_recordset(NULL::attempts, CAST(:rows AS json))
    ORDER BY request_id, attempt
    ON CONFLICT DO NOTHING
    RETURNING request_id, attempt
    """
)


async def write(engine: AsyncEngine, rows: Sequence[Row], poison: Sequence[Poison] = ()) -> Written:
    """Write a batch in one transaction: all of it or nothing, and to its end even if the caller is cancelled.

    A row whose values Postgres cannot take goes to quarantine, the others are written. Any other trouble (the server is
    away, a schema or privileges that are not as they should be) is raised: the same batch is to be tried again.
    """
    return await uncancelled(_write(engine, rows, poison))


async def _write(engine: AsyncEngine, rows: Sequence[Row], poison: Sequence[Poison]) -> Written:
    unique = _unique(rows)
    try:
        async with engine.begin() as connection:
            done = await _insert(connection, unique)
            done.quarantined += await _quarantine(connection, poison)
    except DBAPIError as error:
        if not is_datas_fault(error):
            raise
        return await _sift(engine, unique, poison, error)
    done.duplicates += len(rows) - len(unique)
    return done


async def _sift(engine: AsyncEngine, rows: Sequence[Row], poison: Sequence[Poison], error: DBAPIError) -> Written:
    """Halve the batch until the rows that Postgres refuses stand alone."""
    if not rows:
        raise error  # the quarantine itself refuses: not the event's fault
    if len(rows) == 1:
        reason = str(error.orig or error).splitlines()[0]
        refused = Poison(subject="", payload=msgspec.json.encode(rows[0]), reason=f"Postgres refused the row: {reason}")
        return await _write(engine, [], [*poison, refused])
    middle = len(rows) // 2
    first = await _write(engine, rows[:middle], poison)
    second = await _write(engine, rows[middle:], ())
    return Written(
        inserted=first.inserted + second.inserted,
        duplicates=first.duplicates + second.duplicates,
        replaced=first.replaced + second.replaced,
        quarantined=first.quarantined + second.quarantined,
    )


def _unique(rows: Iterable[Row]) -> list[Row]:
    """One row per key and at most one guess per request; the truth goes before a guess."""
    kept: dict[tuple[str, int], Row] = {}
    for row in rows:
        known = kept.get(row.key)
        if known is None or (known.outcome == "owner_lost" and row.outcome != "owner_lost"):
            kept[row.key] = row
    return list(kept.values())


async def _insert(connection: AsyncConnection, rows: Sequence[Row]) -> Written:
    done = Written()
    waiting = {row.key: row for row in rows if row.outcome != "owner_lost"}
    while waiting:
        inserted = await _insert_new(connection, list(waiting.values()))
        done.inserted += len(inserted)
        refused = {key: row for key, row in waiting.items() if key not in inserted}
        if not refused:
            break
        # every statement sees what others have committed by then, so this ends: a guess is not written over a truth
        waiting = await _drop_guesses(connection, refused)
        done.replaced += len(waiting)
        repeats = {key: row for key, row in refused.items() if key not in waiting}
        strangers = await _second_finals(connection, repeats)
        done.quarantined += await _quarantine(connection, strangers)
        done.duplicates += len(repeats) - len(strangers)
    guesses = [row for row in rows if row.outcome == "owner_lost"]
    if guesses:
        inserted = await _insert_new(connection, guesses)
        done.inserted += len(inserted)
        done.duplicates += len(guesses) - len(inserted)
    return done


async def _insert_new(connection: AsyncConnection, rows: list[Row]) -> set[tuple[str, int]]:
    encoded = msgspec.json.encode(rows).decode()
    return {(row.request_id, row.attempt) for row in await connection.execute(_INSERT, {"rows": encoded})}


async def _drop_guesses(connection: AsyncConnection, refused: dict[tuple[str, int], Row]) -> dict[tuple[str, int], Row]:
    """Delete the guesses that keep these rows out; the rows for which the way is free now."""
    found = await connection.execute(
        select(attempts.c.request_id, attempts.c.attempt)
        .where(attempts.c.outcome == "owner_lost", *_of_requests(refused))
        .order_by(attempts.c.request_id, attempts.c.attempt)
        .with_for_update()
    )
    free: dict[tuple[str, int], Row] = {}
    for request_id, attempt in [tuple(row) for row in found]:
        replacing = {
            key: row
            for key, row in refused.items()
            if row.request_id == request_id and (row.final or row.attempt == attempt)
        }
        if replacing:
            free |= replacing
            await connection.execute(
                delete(attempts).where(
                    attempts.c.request_id == request_id, attempts.c.attempt == attempt, *_of_requests(replacing)
                )
            )
    return free


def _of_requests(rows: dict[tuple[str, int], Row]) -> tuple[ColumnElement[bool], ...]:
    """All rows of these requests; the times of receipt let Postgres look into their partitions only."""
    requests = sorted({row.request_id for row in rows.values()})
    received = sorted({row.received_at for row in rows.values()})
    return (
        attempts.c.request_id == any_(literal(requests, ARRAY(Text))),
        attempts.c.received_at == any_(literal(received, ARRAY(DateTime(timezone=True)))),
    )


async def _second_finals(connection: AsyncConnection, refused: dict[tuple[str, int], Row]) -> list[Poison]:
    """Rows kept out by another attempt's final row: their gateway broke the rule of one final outcome."""
    found = await connection.execute(select(attempts.c.request_id, attempts.c.attempt).where(*_of_requests(refused)))
    there = {tuple(row) for row in found}
    return [
        Poison(subject="", payload=msgspec.json.encode(row), reason=_SECOND_FINAL)
        for key, row in refused.items()
        if key not in there
    ]


async def _quarantine(connection: AsyncConnection, poison: Sequence[Poison]) -> int:
    if not poison:
        return 0
    values = {
        hashlib.sha256(one.payload).digest(): {
            "subject": _text(one.subject),
            "reason": _text(one.reason)[:2000],
            "payload": one.payload[:PAYLOAD_BYTES_MAX],
            "truncated": len(one.payload) > PAYLOAD_BYTES_MAX,
        }
        for one in poison
    }
    statement = (
        insert(quarantine)
        .values([{"payload_hash": key, **value} for key, value in sorted(values.items())])
        .on_conflict_do_nothing()
        .returning(quarantine.c.id)
    )
    return len((await connection.execute(statement)).all())


# -- quarantine ---------------------------------------------------------------------------------------------------


class Redriven(msgspec.Struct, kw_only=True):
    """What became of the quarantine."""

    redriven: int = 0
    duplicates: int = 0
    #: quarantine id → why it stays
    left: dict[str, str] = {}


async def quarantined(engine: AsyncEngine) -> int:
    """How many events are in quarantine."""

    async def work() -> int:
        async with engine.connect() as connection:
            return int((await connection.execute(select(func.count()).select_from(quarantine))).scalar_one())

    return await uncancelled(work())


async def redrive(engine: AsyncEngine, *, dry_run: bool = False) -> Redriven:
    """Write the rows of quarantined events that can be read by now, and drop them; one transaction per event.

    Output that was never delivered gets no estimate: its median is history.
    """
    done = Redriven(left={})
    async with engine.connect() as connection:
        ids = list((await connection.execute(select(quarantine.c.id).order_by(quarantine.c.id))).scalars())
    for number in ids:
        await uncancelled(_redrive_one(engine, number, done, dry_run=dry_run))
    return done


async def _redrive_one(engine: AsyncEngine, number: int, done: Redriven, *, dry_run: bool) -> None:
    try:
        async with engine.begin() as connection:
            # two operators at once: the second skips what the first is at
            query = select(quarantine).where(quarantine.c.id == number).with_for_update(skip_locked=True)
            held = (await connection.execute(query)).one_or_none()
            if held is None:
                return
            if held.truncated:
                done.left[str(number)] = "its payload was too long to keep whole"
                return
            row = _row_again(held.subject, bytes(held.payload))
            if isinstance(row, Poison):
                done.left[str(number)] = row.reason
                return
            if dry_run:
                done.redriven += 1
                return
            written = await _insert(connection, [row])
            if not written.inserted and not written.duplicates:
                raise LedgerError(_SECOND_FINAL)
            await connection.execute(delete(quarantine).where(quarantine.c.id == number))
    except LedgerError as error:
        done.left[str(number)] = str(error)
        return
    except DBAPIError as error:
        if is_transient(error):
            raise
        done.left[str(number)] = f"Postgres refused the row: {str(error.orig or error).splitlines()[0]}"
        return
    done.redriven += written.inserted
    done.duplicates += written.duplicates


def _row_again(subject: str, payload: bytes) -> Row | Poison:
    """Of an event's payload, or (without a subject) of a row that Postgres refused."""
    if subject:
        return read(subject, payload, OutputMedian())
    try:
        return msgspec.json.decode(payload, type=Row)
    except msgspec.DecodeError as error:
        return Poison(subject=subject, payload=payload, reason=str(error))
