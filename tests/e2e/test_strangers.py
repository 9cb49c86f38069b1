"""What is not ours: words of clients that must go nowhere, and messages on the bus that nobody of us said."""

import asyncio
import json
import secrets
import time
from typing import Any

import aiohttp
import nats
import pytest
from tests.e2e.running import Answer, Load, Running, eventually

pytestmark = pytest.mark.timeout(300)


async def _all_streams(fleet: Running, since_s: float) -> bytes:
    """Every message that any stream captured since a moment."""
    from nats.js.api import ConsumerConfig, DeliverPolicy

    client = await nats.connect(fleet.ready["nats"])
    found: list[bytes] = []
    try:
        js = client.jetstream()
        for stream in await client.jsm().streams_info():
            name = stream.config.name or ""
            if not name.startswith("TF_"):
                continue
            when = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(since_s))
            config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=when)  # type: ignore[arg-type]
            subscription = await js.subscribe(
                (stream.config.subjects or [""])[0], stream=name, ordered_consumer=True, config=config
            )
            while True:
                try:
                    message = await subscription.next_msg(timeout=0.3)
                except (nats.errors.TimeoutError, TimeoutError):
                    break
                found += [message.subject.encode(), message.data]
    finally:
        await client.close()
    return b"\n".join(found)


async def test_words_and_keys_are_nowhere_but_at_the_engine(fleet: Running) -> None:
    """Keys, prompts and e-mail addresses in logs, metrics, events and error bodies (X03): not one."""
    began_s = time.time()
    canary = f"canary{secrets.token_hex(6)}"
    wrong_key = f"tf_{canary}"
    bodies: list[str] = []
    async with fleet.session() as session:
        for stream in (True, False):
            good = await fleet.ask(session, prompt=f"{canary} mail me at {canary}@example.org", stream=stream, tokens=4)
            assert good.completed
        await fleet.ask(session, prompt=canary, model=f"m-{canary}", tokens=4)
        await fleet.ask(session, prompt=canary * 2000, tokens=4)
        await fleet.ask(session, prompt=canary, tokens=20_000)
        async with fleet.faulty(fleet.instances("chat-8b", "1"), "reset", n=2):
            await fleet.ask(session, prompt=canary, tokens=20)
        for key in (wrong_key, f"{fleet.keys['studio']}x"):
            async with session.post(
                f"{fleet.api}/chat/completions",
                data=f'{{"model": "{canary}',
                headers={"Authorization": f"Bearer {key}"},
            ) as answer:
                assert answer.status == 401
                bodies.append(await answer.text())
        async with session.post(
            f"{fleet.api}/chat/completions", data=f'{{"messages": ["{canary}"], ',
            headers={"Authorization": f"Bearer {fleet.keys['studio']}", "Content-Type": "application/json"},
        ) as answer:  # fmt: skip
            assert answer.status == 400
            bodies.append(await answer.text())
        pages = []
        for url in fleet.ready["metrics"].values():
            async with session.get(url) as page:
                pages.append(await page.text())
    secrets_ = [canary, fleet.keys["studio"], fleet.keys["bank"]]
    everything = {
        "error bodies": "\n".join(bodies),
        "metrics": "\n".join(pages),
        "streams": (await _all_streams(fleet, began_s)).decode(errors="replace"),
        "ledger": json.dumps(
            await fleet.sql("SELECT * FROM attempts WHERE received_at > now() - interval '2 minutes'"), default=str
        ),
        **{f"log of {name}": fleet.service_log(name) for name in fleet.ready["pids"]},
    }
    assert len(everything["streams"]) > 1000
    # a model's name is what the client asked for, and may be said to it; beyond that, nothing
    hits = {where: [s for s in secrets_ if s in text] for where, text in everything.items()}
    assert {where: found for where, found in hits.items() if found} == {}
    # 401 says the same whatever is wrong
    assert bodies[0] == bodies[1]


async def test_a_client_does_not_choose_who_it_is(fleet: Running) -> None:
    """Tenant, priority, zone and salt from headers and bodies (X01, A06, A10): the key alone decides."""
    spoofed = [
        ("X-Tenant", "studio"), ("X-Tokenfleet-Tenant", "studio"), ("X-Tokenfleet-Request-Id", "mine"),
        ("X-Request-Id", "mine"), ("X-Tokenfleet-Class", "batch"), ("X-Priority", "0"), ("X-Residency", "*"),
        ("x_tenant", "studio"), ("X-Forwarded-For", "10.0.0.1"), ("X-Forwarded-For", "10.0.0.2"),
        ("X-Session-Id", "mine"),
    ]  # fmt: skip
    body = {
        "model": "chat-8b", "max_tokens": 3, "messages": [{"role": "user", "content": "who am I"}], "priority": -100,
        "cache_salt": "theirs", "kv_transfer_params": {"a": 1}, "request_id": "mine", "user": "somebody",
        "metadata": {"class": "interactive", "tenant": "studio", "zone": "us", "other": "kept"},
    }  # fmt: skip
    headers = [("Authorization", f"Bearer {fleet.keys['bank']}"), *spoofed]
    async with (
        fleet.session() as session,
        session.post(f"{fleet.api}/chat/completions", json=body, headers=headers) as answer,
    ):
        assert answer.status == 200, await answer.text()
        request_id = answer.headers["X-Tokenfleet-Request-Id"]
        await answer.read()
    assert request_id != "mine"
    row = await fleet.final(request_id)
    assert (row["tenant"], row["service_class"]) == ("bank", "interactive")
    assert row["served_site"] in ("b", "c")
    seen = (await fleet.emulator(row["instance"], "requests"))["requests"]
    mine = next(one for one in seen if one["request_id"] == f"{request_id}-1")
    assert mine["priority"] == 0  # of the class, not of the client
    assert mine["cache_salt"] not in ("", "theirs")
    assert not mine["authorization"]  # the client's key stays here
    assert set(mine["headers"]) == {
        "x-request-id", "x-tokenfleet-request-id", "x-tokenfleet-attempt", "x-tokenfleet-class",
    }  # fmt: skip
    assert not {"x-tenant", "x-priority", "x-residency", "x-forwarded-for", "x_tenant"} & set(mine["header_names"])


async def test_tenants_share_no_prefix_cache(fleet: Running) -> None:
    """The same words of two tenants have two salts: neither can tell from its speed what the other asked."""
    prompt = "A secret that both of them know. " * 40
    async with fleet.session() as session:

        async def cached(tenant: str) -> int:
            one = await fleet.ask(session, tenant=tenant, cls="chat", prompt=prompt, tokens=2)
            assert one.completed
            return int(one.usage["prompt_tokens_details"]["cached_tokens"])

        # one block of sixteen is the template's own opening
        assert await cached("studio") <= 16
        again = [await cached("studio") for _ in range(3)]
        assert max(again) > 1000, again
        assert await cached("bank") <= 16


@pytest.fixture
async def admin(fleet: Running) -> Any:
    client = await nats.connect(fleet.ready["nats"])
    yield client
    await client.close()


async def test_noise_on_the_bus_is_skipped(fleet: Running, admin: nats.NATS) -> None:
    """A foreign publisher: broken JSON and other types on our subjects. Skipped and counted; traffic flows."""
    noise = [b"", b"{", b"null", b"[]", b'{"type":"tokenfleet.unknown.v9.thing"}', b"\xff\xfe", b"x" * 100_000]
    subjects = [
        "tf.v1.request.received.a.chat-8b.nobody", "tf.v1.admission.decided.a.chat-8b.studio",
        "tf.v1.placement.requested.b.chat-8b.nobody", "tf.v1.placement.assigned.b.chat-8b.nobody",
        "tf.v1.placement.held.b.chat-8b.nobody", "tf.v1.placement.released.b.chat-8b.nobody",
        "tf.v1.placement.declined.b.chat-8b.nobody", "tf.v1.room.offered.b.chat-8b.b-chat-1",
        "tf.v1.room.declined.b.chat-8b.b-chat-1", "tf.v1.outcome.started.a.chat-8b.b-chat-1",
        "tf.v1.gateway.leased.a._.nobody", "tf.v1.capacity.reported.b.chat-8b.b-chat-9",
        "tf.v1.outcome.finished.a.chat-8b.b-chat-1", "tf.v1.plan.issued._._._", "tf.v2.request.received.a.b.c",
    ]  # fmt: skip
    before = {name: fleet.pid(name) for name in fleet.ready["metrics"]}
    async with Load(fleet, rate_per_s=4.0, tokens=10) as load:
        await load.completions(2)
        for subject in subjects:
            for data in noise:
                await admin.publish(subject, data)
        await admin.flush()
        await load.completions(6)
    assert [one for one in load.answers if not one.completed] == []
    assert {name: fleet.pid(name) for name in fleet.ready["metrics"]} == before

    async def quarantined() -> bool:
        return await fleet.total("accountant", "tokenfleet_ledger_quarantined_total") > 0

    await eventually(quarantined, within_s=10, what="poison outcomes in quarantine")
    fleet.forgiven = await fleet.never_things()
    assert set(fleet.forgiven) == {"accountant tokenfleet_ledger_quarantined_total {}"}


async def test_repeated_messages_change_nothing(fleet: Running, admin: nats.NATS) -> None:
    """Everything of a request said a second time, minutes later and out of order: one row, nothing booked."""
    began_s = time.time()
    async with fleet.session() as session:
        answers: list[Answer] = [await fleet.ask(session, tokens=5, prompt=f"Again {n}") for n in range(3)]
    for one in answers:
        await fleet.final(one.request_id)
    js = admin.jetstream()
    messages: list[tuple[str, bytes]] = []
    for stream in ("TF_REQUEST", "TF_ADMISSION", "TF_PLACEMENT", "TF_OUTCOME"):
        info = await admin.jsm().stream_info(stream)
        for sequence in range(max(1, info.state.last_seq - 30), info.state.last_seq + 1):
            try:
                message = await js.get_msg(stream, sequence)
            except nats.js.errors.NotFoundError:
                continue
            if any(one.request_id.encode() in (message.data or b"") for one in answers):
                messages.append((message.subject or "", message.data or b""))
    assert len(messages) >= 15
    received = await fleet.received()
    for subject, data in reversed(messages):
        # without its id the stream's duplicate window does not see it either
        await admin.publish(subject, data)
    await admin.flush()
    await fleet.invariants(within_s=25)
    assert await fleet.received() == received
    rows = await fleet.ledger_agrees(answers, since_s=began_s)
    assert all(len(found) == 1 for found in rows.values())


async def test_made_up_decisions_do_not_move_a_request(fleet: Running, admin: nats.NATS) -> None:
    """An assignment that nobody asked for is declined, and what it booked is dropped."""
    async with fleet.session() as session:
        real = await fleet.ask(session, tokens=5)
    js = admin.jetstream()
    found = await js.get_last_msg("TF_PLACEMENT", "tf.v1.placement.assigned.*.*.*")
    event = json.loads(found.data or b"{}")
    assert event["request_id"] == real.request_id
    for number in range(5):
        made_up = {**event, "id": f"{event['id']}:made-up:{number}", "request_id": f"req-made-up-{number}"}
        await admin.publish(found.subject or "", json.dumps(made_up).encode())
    await admin.flush()

    async def declined() -> bool:
        return await fleet.total("gateway", "tokenfleet_gateway_notes_total", note="declined", detail="closed") >= 5

    await eventually(declined, within_s=5, what="declined")
    await fleet.invariants(within_s=10)


async def test_slow_and_odd_but_right_bodies(fleet: Running) -> None:
    """Chunked, dribbled, with `Expect: 100-continue`, with a byte order of fields nobody expected: all are served."""

    async def dribble() -> Any:
        body = b'{"stream": false, "messages": [{"content": "hi", "role": "user"}], "max_tokens": 2, "model":"chat-8b"}'
        for at in range(0, len(body), 9):
            yield body[at : at + 9]
            await asyncio.sleep(0.02)

    headers = {"Authorization": f"Bearer {fleet.keys['studio']}", "Content-Type": "application/json; charset=utf-8"}
    async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=30)) as session:
        for more in ({}, {"Expect": "100-continue"}):
            async with session.post(
                f"{fleet.api}/chat/completions", data=dribble(), headers={**headers, **more}
            ) as answer:
                assert answer.status == 200, await answer.text()
                assert (await answer.json())["usage"]["completion_tokens"] == 2
