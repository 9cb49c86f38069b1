"""`tokenfleet goodput` and `tokenfleet explain` against a ledger and streams of known content."""

import asyncio
import contextlib
import csv
import io
import json
import math
import os
import random
import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import asyncpg
import nats
import pytest

from tokenfleet.accountant import store
from tokenfleet.accountant.policy import OutputMedian
from tokenfleet.cli.__main__ import main
from tokenfleet.database import create_engine
from tokenfleet.runtime.bus import Bus
from tokenfleet.runtime.clock import Clock
from tokenfleet.runtime.settings import Settings
from tokenfleet_schemas import codec
from tokenfleet_schemas.admission import AdmissionDecided
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.outcome import OutcomeFinished, Times
from tokenfleet_schemas.placement import Considered, PlacementAssigned, PlacementHeld, PlacementRequested, Work
from tokenfleet_schemas.request import Ask, RequestReceived
from tokenfleet_schemas.routes import subject_of


async def tokenfleet(*words: str, **environ: str) -> tuple[int, str, str]:
    """The command as it runs, in a thread of its own instead of a process: an interpreter's start is saved."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith("TOKENFLEET_")}
    out, error = io.StringIO(), io.StringIO()
    with (
        mock.patch.dict(os.environ, clean | environ, clear=True),
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(error),
    ):
        code = await asyncio.to_thread(main, words)
    return code, out.getvalue(), error.getvalue()


def outcome(request_id: str, *, age_s: float, **changes: Any) -> OutcomeFinished:
    times = changes.pop("times", Times(ttft_ms=100.0, tpot_ms=10.0, e2e_ms=300.0))
    values: dict[str, Any] = {
        "id": f"{request_id}:finished",
        "site": "a",
        "request_id": request_id,
        "attempt": 1,
        "final": True,
        "outcome": "completed",
        "gateway": "g",
        "gateway_incarnation": "i1",
        "tenant": "acme",
        "service_class": "chat",
        "model_asked": "m",
        "model": "m",
        "version": "1",
        "served_site": "b",
        "instance": "b1",
        "input_tokens": 10,
        "output_tokens": 20,
        "received_unix_ms": int((time.time() - age_s) * 1000 - times.e2e_ms),
        "times": times,
        "ttft_objective_ms": 500.0,
    }
    return OutcomeFinished(**(values | changes))


def rank(values: Sequence[float], quantile: float) -> float | None:
    ordered = sorted(values)
    value = ordered[max(0, math.ceil(quantile * len(ordered)) - 1)]
    return None if math.isinf(value) else round(value, 3)


async def test_goodput_is_what_a_plain_recount_of_the_ledger_says(database_url: str) -> None:
    """The number that every policy is judged by: counted by hand from 600 random outcomes, by class and site."""
    rng = random.Random(11)
    medians = OutputMedian()
    rows = []
    for number in range(600):
        kind = rng.choice(["completed"] * 6 + ["refused", "cancelled", "failed_midstream", "owner_lost", "failed"])
        served = kind not in ("refused",)
        event = outcome(
            f"r{number}",
            age_s=rng.choice((10, 600, 3000, 9000)),
            outcome=kind,
            final=kind != "failed",
            service_class=rng.choice(("chat", "batch")),
            served_site=rng.choice(("b", "c")) if served else "",
            output_tokens=rng.randrange(1, 200) if served else 0,
            times=Times(
                ttft_ms=round(rng.uniform(50, 800), 3) if served else None,
                tpot_ms=9.5 if served else None,
                e2e_ms=900.0,
            ),
        )
        medians.learn(event)
        rows.append(store.row_of(event, medians))
    engine = create_engine(database_url)
    await store.write(engine, rows)
    await engine.dispose()

    code, out, error = await tokenfleet(
        "goodput", "--since", "1h", "--by", "class,site", "--json", TOKENFLEET_POSTGRES_URL=database_url
    )
    assert code == 0, error
    answer = json.loads(out)
    recent = [row for row in rows if time.time() - row.finished_at.timestamp() < 3600]
    assert 0 < len(recent) < len(rows)

    def expected(held: list[store.Row]) -> dict[str, Any]:
        final = [row for row in held if row.final]
        compliant = sum(row.output_tokens for row in held if row.compliant)
        completed = [row.output_tokens for row in recent if row.final and row.outcome == "completed"]
        assert completed
        offered = sum(row.offered_output_tokens or 0 for row in final)
        wasted: dict[str, int] = {}
        for row in held:
            if row.wasted_tokens:
                wasted[row.wasted_cause] = wasted.get(row.wasted_cause, 0) + row.wasted_tokens
        return {
            "offered": len(final),
            "completed": sum(row.outcome == "completed" for row in final),
            "refused": sum(row.outcome == "refused" for row in final),
            "cancelled": sum(row.outcome == "cancelled" for row in final),
            "failed": sum(row.outcome in ("failed_midstream", "owner_lost") for row in final),
            "compliant": sum(row.compliant for row in held),
            "repeated": len(held) - len(final),
            "output_tokens": sum(row.output_tokens for row in held),
            "compliant_tokens": compliant,
            "offered_tokens": offered,
            "goodput_tokens_per_s": round(compliant / 3600, 3),
            "compliance": round(compliant / offered, 6) if offered else None,
            "compliance_requests": round(sum(r.compliant for r in held) / len(final), 6) if final else None,
            "wasted_tokens": wasted,
            "p99": rank([math.inf if row.ttft_ms is None else row.ttft_ms for row in final], 0.99),
            "p50": rank([math.inf if row.ttft_ms is None else row.ttft_ms for row in final], 0.5),
        }

    def found(result: dict[str, Any]) -> dict[str, Any]:
        return {name: result[name] for name in expected(recent) if name in result} | {
            "p99": result["ttft_ms"]["p99"],
            "p50": result["ttft_ms"]["p50"],
        }

    known = all(row.offered_output_tokens is not None for row in recent)
    if not known:  # the first rows of all were written before any length was known
        for name in ("offered_tokens", "compliance"):
            answer["overall"].pop(name)
    assert found(answer["overall"]) == {
        name: value for name, value in expected(recent).items() if name in found(answer["overall"])
    }
    assert answer["overall"]["compliance_estimated"] is True
    groups = {(g["group"]["class"], g["group"]["site"]): g for g in answer["groups"]}
    assert set(groups) == {(row.service_class, row.served_site) for row in recent}
    for key, group in groups.items():
        held = [row for row in recent if (row.service_class, row.served_site) == key]
        if all(row.offered_output_tokens is not None for row in held):
            assert found(group) == expected(held)

    code, out, _ = await tokenfleet("goodput", "--by", "class", "--csv", TOKENFLEET_POSTGRES_URL=database_url)
    lines = list(csv.DictReader(io.StringIO(out)))
    assert (code, [line["class"] for line in lines]) == (0, ["batch", "chat"])
    assert sum(int(line["offered"]) for line in lines) == answer["overall"]["offered"]
    code, out, _ = await tokenfleet("goodput", "--by", "class,tenant,site,model", TOKENFLEET_POSTGRES_URL=database_url)
    assert (code, "all" in out, "estimated by the median" in out) == (0, True, True)


PRICED = """
[fleet]
name = "test"
default_class = "chat"
[sites.a]
zone = "eu"
entry = true
[sites.b]
zone = "eu"
gpus = 4
gpu_hour_price = 2.5
[sites.c]
zone = "eu"
gpus = 2
gpu_hour_price = 3.0
[sites.d]
zone = "eu"
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 1000
[classes.chat]
ttft_ms = 500
[tenants.acme]
zones = ["eu"]
classes = ["chat"]
"""


async def test_what_compliant_tokens_cost(database_url: str, tmp_path: Path) -> None:
    """Two priced sites, one of them idle, and one without a price: GPUs cost while they wait, waste makes it dearer."""
    late = Times(ttft_ms=900.0, tpot_ms=10.0, e2e_ms=1300.0)
    rows = [
        store.row_of(event, OutputMedian())
        for event in (
            outcome("good", age_s=60, output_tokens=3000),
            outcome("late", age_s=60, output_tokens=1000, times=late, tenant="other"),
            outcome("free", age_s=60, output_tokens=5000, served_site="d", tenant="third"),
        )
    ]
    engine = create_engine(database_url)
    await store.write(engine, rows)
    await engine.dispose()
    (tmp_path / "fleet.toml").write_text(PRICED)
    words = ("goodput", "--since", "2h", "--fleet", str(tmp_path / "fleet.toml"))

    async def answer(*more: str) -> dict[str, Any]:
        code, out, error = await tokenfleet(*words, "--json", *more, TOKENFLEET_POSTGRES_URL=database_url)
        assert code == 0, error
        found: dict[str, Any] = json.loads(out)
        return found

    by_tenant = await answer("--by", "tenant")
    assert by_tenant["hourly_costs"] == {"b": 10.0, "c": 6.0}
    # two hours of both sites, over the 3,000 tokens that counted at a priced site
    assert by_tenant["overall"]["cost"] == 32.0
    assert by_tenant["overall"]["cost_per_million_compliant_tokens"] == round(32 / 3000 * 1e6, 6)
    costs = {g["group"]["tenant"]: (g["cost"], g["cost_per_million_compliant_tokens"]) for g in by_tenant["groups"]}
    assert costs == {"acme": (15.0, 5000.0), "other": (5.0, None), "third": (None, None)}
    by_site = {g["group"]["site"]: g["cost"] for g in (await answer("--by", "site"))["groups"]}
    assert by_site == {"b": 20.0, "d": None}
    code, out, _ = await tokenfleet(*words, "--by", "site", TOKENFLEET_POSTGRES_URL=database_url)
    assert (code, "COST/M" in out, "of b, c" in out) == (0, True, True)
    code, out, _ = await tokenfleet(*words, "--csv", TOKENFLEET_POSTGRES_URL=database_url)
    assert next(csv.DictReader(io.StringIO(out)))["cost"] == "20.0"
    # no file, no prices; but a file that was named must be there
    code, out, _ = await tokenfleet("goodput", "--json", TOKENFLEET_POSTGRES_URL=database_url)
    assert (code, json.loads(out)["overall"]["cost"]) == (0, None)
    gone = ("goodput", "--fleet", str(tmp_path / "gone.toml"))
    assert (await tokenfleet(*gone, TOKENFLEET_POSTGRES_URL=database_url))[0] == 2


async def test_a_page_that_stands_alone(database_url: str, tmp_path: Path) -> None:
    """The report is mailed to somebody without network: nothing is loaded, names are escaped, emptiness is drawn."""
    page = tmp_path / "goodput.html"
    code, out, error = await tokenfleet("goodput", "--html", str(page), TOKENFLEET_POSTGRES_URL=database_url)
    assert (code, error) == (0, "")
    assert "nothing finished" not in out
    empty = page.read_text(encoding="utf-8")
    assert empty.count("<img") == 3
    rows = [
        store.row_of(outcome(f"r{n}", age_s=30 * n, tenant="<script>alert(1)</script>", outcome=kind), OutputMedian())
        for n, kind in enumerate(["completed"] * 20 + ["refused", "cancelled", "failed_midstream"])
    ]
    engine = create_engine(database_url)
    await store.write(engine, rows)
    await engine.dispose()
    words = ("goodput", "--by", "class,tenant", "--html", str(page))
    assert (await tokenfleet(*words, TOKENFLEET_POSTGRES_URL=database_url))[0] == 0
    full = page.read_text(encoding="utf-8")
    assert "<script" not in full
    assert "&lt;script&gt;" in full
    assert re.findall(r'(?:src|href)="(?!data:)', full) == []
    assert "Goodput of the last hour" in full
    assert len(full) > len(empty)
    unwritable = ("goodput", "--html", str(tmp_path / "none" / "page.html"))
    code, _, error = await tokenfleet(*unwritable, TOKENFLEET_POSTGRES_URL=database_url)
    assert (code, "cannot write" in error) == (1, True)


async def test_views_say_what_the_report_says(database_url: str) -> None:
    """A dashboard on the views and the command must not disagree, and nobody changes the ledger through a view."""
    rows = []
    now_ms = int(time.time() * 1000) - 5_000
    for number in range(60):
        attempts = 1 + number % 3
        for attempt in range(1, attempts + 1):
            kind = "completed" if number % 5 else "cancelled"
            final = attempt == attempts
            event = outcome(
                f"r{number}",
                age_s=0,
                attempt=attempt,
                final=final,
                outcome=kind if final else "failed",
                received_unix_ms=now_ms - 20_000 * number,
            )
            rows.append(store.row_of(event, OutputMedian()))
    engine = create_engine(database_url)
    await store.write(engine, rows)
    await engine.dispose()
    _, out, _ = await tokenfleet("goodput", "--since", "2h", "--json", TOKENFLEET_POSTGRES_URL=database_url)
    overall = json.loads(out)["overall"]
    names = ("offered", "completed", "compliant", "refused", "cancelled", "failed", "repeated", "output_tokens",
             "compliant_tokens")  # fmt: skip
    connection = await asyncpg.connect(database_url)
    try:
        sums = await connection.fetchrow(
            f"SELECT {', '.join(f'sum({name})::bigint AS {name}' for name in names)} FROM goodput_minutes"
        )
        assert dict(sums) == {name: overall[name] for name in names}
        wasted = await connection.fetch(
            "SELECT wasted_cause, sum(wasted_tokens)::bigint FROM wasted_minutes GROUP BY 1"
        )
        assert dict(wasted) == overall["wasted_tokens"]
        requests = await connection.fetch("SELECT outcome, attempts, instances FROM ledger_requests")
        assert (len(requests), sum(one["attempts"] for one in requests)) == (60, len(rows))
        assert all(one["attempts"] == len(one["instances"]) for one in requests)
        # the function says the same of the same stretch
        whole = "goodput_windows('-infinity', 'infinity', '1 minute')"
        assert await connection.fetch(f"SELECT * FROM {whole} ORDER BY 1, 2, 3, 4, 5") == await connection.fetch(
            "SELECT * FROM goodput_minutes ORDER BY 1, 2, 3, 4, 5"
        )
        tens = "goodput_windows(now() - interval '10 minutes', now(), '10 seconds')"
        some = await connection.fetchrow(
            f"SELECT sum(offered)::int, (SELECT count(*)::int FROM attempts WHERE final AND finished_at <= now() "
            f"AND finished_at > now() - interval '10 minutes') FROM {tens}"
        )
        assert 0 < some[0] == some[1] < 60
        # the end of a minute belongs to it, as in the windows
        edge = await connection.fetchval(
            "SELECT count(*) FROM goodput_minutes WHERE minute_end <= (SELECT min(finished_at) FROM attempts) "
            "- interval '1 microsecond'"
        )
        assert edge == 0
        assert await connection.fetch("SELECT * FROM ledger_contradictions") == []
        for view in ("goodput_minutes", "wasted_minutes", "ledger_requests", "ledger_contradictions"):
            with pytest.raises(asyncpg.PostgresError, match="cannot delete from view"):
                await connection.execute(f"DELETE FROM {view}")
    finally:
        await connection.close()


async def test_an_empty_ledger_is_no_hundred_percent(database_url: str) -> None:
    """Nothing offered: compliance is unknown, not perfect and not zero."""
    code, out, _ = await tokenfleet("goodput", "--json", TOKENFLEET_POSTGRES_URL=database_url)
    overall = json.loads(out)["overall"]
    assert (code, overall["offered"], overall["compliance"], overall["compliance_requests"]) == (0, 0, None, None)
    assert (await tokenfleet("goodput", TOKENFLEET_POSTGRES_URL=database_url))[0] == 0
    for words in (("--by", "colour"), ("--since", "soon"), ("--by", "class,class")):
        assert (await tokenfleet("goodput", *words, TOKENFLEET_POSTGRES_URL=database_url))[0] == 2


ASK = Ask(
    request_id="req-1",
    gateway="g",
    gateway_incarnation="i1",
    entry="a",
    entry_zone="eu",
    tenant="acme",
    service_class="chat",
    model_asked="m",
    model="m",
    version="1",
    input_tokens=1234,
    received_unix_ms=0,
    ttft_ms=500.0,
    patience_ms=1000.0,
    prefix="c2VjcmV0",
)


def road(request_id: str) -> list[Event]:
    import msgspec

    ask = msgspec.structs.replace(ASK, request_id=request_id, received_unix_ms=int(time.time() * 1000))
    common: dict[str, Any] = {
        "request_id": request_id, "gateway": "g", "tenant": "acme", "service_class": "chat", "model": "m",
        "version": "1", "attempt": 1, "revision": 0, "site": "b", "work": Work(prefill_tokens=1, decode_tokens=1,
        kv_tokens=2),
    }  # fmt: skip
    held = {"entry": "a", "home_instance": "b1", "predicted_wait_ms": 812.0, "predicted_own_ms": 90.0}
    return [
        RequestReceived(id=f"{request_id}:received", site="a", ask=ask),
        AdmissionDecided(id=f"{request_id}:decided", site="a", ask=ask, admitted=True),
        PlacementRequested(
            id=f"{request_id}:requested", site="b", ask=ask,
            sites=(Considered(name="b", terms={"rtt_ms": 5.0}, chosen=True), Considered(name="c", out="residency")),
        ),
        PlacementHeld(
            id=f"{request_id}:held", **common, **held, patience_left_ms=900.0, received_unix_ms=0, lacks="kv_tokens"
        ),
        PlacementAssigned(
            id=f"{request_id}:assigned", **common, instance="b2", incarnation="x", endpoint_url="http://b2",
            how="released", candidates=(Considered(name="b1", out="kv_tokens"),
            Considered(name="b2", terms={"work_ms": 90.0}, chosen=True)),
        ),
        outcome(request_id, age_s=0.0, instance="b2"),
    ]  # fmt: skip


async def test_explain_tells_the_road_and_only_of_the_request_asked_for(clean_nats_url: str, database_url: str) -> None:
    """Why did this request wait, and why was it served there? In order, with the reasons of those who decided."""
    bus = Bus(Settings(nats_url=clean_nats_url), Clock(), "test")
    await bus.connect()
    await bus.provision()
    client = await nats.connect(clean_nats_url)
    stream = client.jetstream()
    for ours, others in zip(road("req-1"), road("req-10"), strict=True):
        for event in (others, ours):
            await stream.publish(subject_of(event), codec.encode(event))
    await client.close()
    await bus.close()
    engine = create_engine(database_url)
    last = road("req-1")[-1]
    assert isinstance(last, OutcomeFinished)
    await store.write(engine, [store.row_of(last, OutputMedian())])
    await engine.dispose()
    environ = {"TOKENFLEET_POSTGRES_URL": database_url, "TOKENFLEET_NATS_URL": clean_nats_url}

    code, out, error = await tokenfleet("explain", "req-1", "--json", **environ)
    assert (code, error) == (0, "")
    answer = json.loads(out)
    assert [event["type"].split(".")[-1] for event in answer["events"]] == [
        "received", "decided", "requested", "held", "assigned", "finished",
    ]  # fmt: skip
    assert [row["outcome"] for row in answer["attempts"]] == ["completed"]
    assert "c2VjcmV0" not in out
    assert "req-10" not in out

    code, out, _ = await tokenfleet("explain", "req-1", **environ)
    assert code == 0
    for said in (
        "chat of acme for m@1 at g, 1234 tokens in",
        "c  out: residency",
        "held, lacks kv_tokens, home b1",
        "-> b2  work_ms 90",
        "ledger: attempt 1 on b2 at b: completed, compliant",
    ):
        assert said in out, out

    # known by half: still in flight, without a ledger, without a bus
    code, out, _ = await tokenfleet("explain", "req-10", **environ)
    assert (code, "not in the ledger" in out) == (0, True)
    code, out, error = await tokenfleet("explain", "req-1", TOKENFLEET_NATS_URL=clean_nats_url)
    assert (code, "no ledger" in error) == (0, True)
    code, out, error = await tokenfleet("explain", "req-1", **(environ | {"TOKENFLEET_NATS_URL": "nats://127.0.0.1:1"}))
    assert (code, "streams have forgotten it" in out, "could not be read" in error) == (0, True, True)
    code, _, error = await tokenfleet("explain", "nobody", **environ)
    assert (code, "nothing is known of request 'nobody'" in error) == (1, True)
