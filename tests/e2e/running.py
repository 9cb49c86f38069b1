"""A whole running fleet as the end-to-end tests see it: from outside, by its public doors only.

`Running` is `tokenfleet up` as a process with everything its ready file names. `Load` drives it like honest clients, a
few requests a second, and remembers how every request ended. `invariants` is what must hold after anything whatsoever:
every counter of something open is exactly 0, no core failed on a message, no engine works on anything, and no process
keeps files, tasks or memory of what is over.
"""

import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp
import asyncpg
import nats
import psutil
from prometheus_client.parser import text_string_to_metric_families

ROOT = Path(__file__).parents[2]
#: until all answers; a machine that also builds and tests other things needs it
START_S = 180.0
#: gauges of something open: in flight, held, booked, reserved, waiting, not yet written
OPEN = re.compile(
    r"^tokenfleet_(?:\w+_)?(?:open_requests|held_requests|running_requests|waiting_requests|pending_requests|booked_\w+|reserved_tokens"
    r"|outbox_pending|clients|ledger_lag)$"
)
#: counters that must stay 0: a core failed on a message, an event was skipped, a row was poison
NEVER = re.compile(
    r"^tokenfleet_(?:\w+_)?(?:core_errors|skipped_events|undecodable|ledger_quarantined)_total$",
)

Check = Callable[[], Awaitable[Any]]


def patience(seconds: float) -> float:
    """How long to wait for something that takes at most `seconds` on a machine that is not busy with other things.

    A shared machine stretches everything by its load; what is asserted is the same, only later.
    """
    cores = os.cpu_count() or 1
    return seconds * max(1.0, min(5.0, os.getloadavg()[0] / cores))


async def eventually(check: Check, *, within_s: float, what: str) -> Any:
    """Ask until the answer is true; fails with the last answer."""
    end = time.monotonic() + patience(within_s)
    while True:
        found = await check()
        if found:
            return found
        assert time.monotonic() < end, f"{what}: not within {within_s} s"
        await asyncio.sleep(0.1)


@dataclass(frozen=True)
class Weight:
    """What a process holds."""

    pid: int
    files: int
    threads: int
    tasks: float
    rss_mib: float


@dataclass(kw_only=True)
class Answer:
    """One request as its client saw it."""

    #: whole JSON body, or the pieces of the stream joined
    status: int = 0
    request_id: str = ""
    site: str = ""
    served: str = ""
    attempts: int = 0
    text: str = ""
    #: the emulated engines' tokens are characters
    tokens: int = 0
    #: events with content; an engine under load puts several tokens into one
    chunks: int = 0
    usage: dict[str, Any] = field(default_factory=dict)
    finish_reason: str = ""
    done: bool = False
    #: code of the error object, by status or in the stream
    code: str = ""
    error: dict[str, Any] = field(default_factory=dict)
    errors: int = 0
    retry_after: str = ""
    #: class of what broke the connection
    broken: str = ""
    sent_s: float = 0.0
    first_s: float | None = None
    ended_s: float = 0.0

    @property
    def completed(self) -> bool:
        """A whole answer."""
        return self.status == 200 and self.done and not self.code and not self.broken and bool(self.finish_reason)

    @property
    def ended_typed(self) -> bool:
        """The client knows how it ended: a whole answer, an error object, or a connection that broke visibly."""
        return self.completed or bool(self.code) or bool(self.broken)


class Running:
    """One `tokenfleet up`."""

    def __init__(self, process: "subprocess.Popen[str]", ready_file: Path, data_dir: Path, log: Path) -> None:
        self.process = process
        self.data_dir = data_dir
        self.log = log
        self._ready_file = ready_file
        self.keys: dict[str, str] = json.loads((data_dir / "keys.json").read_text())
        self.baseline: dict[str, Weight] = {}
        #: counters of `NEVER` that a test raised on purpose
        self.forgiven: dict[str, float] = {}

    @property
    def ready(self) -> dict[str, Any]:
        """The ready file as it is now."""
        found: dict[str, Any] = json.loads(self._ready_file.read_text())
        return found

    @property
    def api(self) -> str:
        """Base URL with /v1."""
        return str(self.ready["api"])

    def pid(self, name: str) -> int:
        """Process id of one service now."""
        return int(self.ready["pids"][name])

    def service_log(self, name: str) -> str:
        """What a service has said so far."""
        return (self.data_dir / "logs" / f"{name}.log").read_text(errors="replace")

    # --- what services say ----------------------------------------------------------------------------------

    async def metrics(self, name: str) -> dict[str, dict[tuple[tuple[str, str], ...], float]]:
        """Sample name → labels → value of one service."""
        async with aiohttp.ClientSession() as session, session.get(self.ready["metrics"][name]) as answer:
            assert answer.status == 200, name
            page = await answer.text()
        found: dict[str, dict[tuple[tuple[str, str], ...], float]] = {}
        for family in text_string_to_metric_families(page):
            for sample in family.samples:
                found.setdefault(sample.name, {})[tuple(sorted(sample.labels.items()))] = sample.value
        return found

    async def total(self, service: str, metric: str, **labels: str) -> float:
        """Sum of a metric's samples that bear these labels."""
        found = (await self.metrics(service)).get(metric, {})
        return sum(v for k, v in found.items() if set(labels.items()) <= set(k))

    async def emulator(self, instance: str, path: str = "state") -> dict[str, Any]:
        """An emulated engine's own account."""
        url = f"{self.ready['emulators'][instance]['admin']}/{path}"
        async with aiohttp.ClientSession() as session, session.get(url) as answer:
            assert answer.status == 200
            found: dict[str, Any] = await answer.json()
            return found

    async def received(self, *instances: str) -> int:
        """Requests that these engines (or all) have seen since they were started."""
        return sum([(await self.emulator(one))["received_requests"] for one in instances or self.ready["emulators"]])

    async def fault(self, instance: str, kind: str, **what: Any) -> None:
        """Command a fault."""
        url = f"{self.ready['emulators'][instance]['admin']}/faults"
        async with aiohttp.ClientSession() as session, session.post(url, json={"kind": kind, **what}) as answer:
            assert answer.status == 200, await answer.text()

    @asynccontextmanager
    async def faulty(self, instances: Iterable[str], kind: str, **what: Any) -> AsyncIterator[None]:
        """A fault on these for a while."""
        names = list(instances)
        try:
            for name in names:
                await self.fault(name, kind, **what)
            yield
        finally:
            for name in names:
                await self.fault(name, "none")

    def instances(self, model: str = "", version: str = "", site: str = "") -> list[str]:
        """Emulated instances by the reference fleet's names (`b-chat-1`: site, model, version; documents alike)."""
        found = []
        for name in self.ready["emulators"]:
            at, kind, ver = name.split("-")
            here = {"chat": "chat-8b", "doc": "doc-32b"}[kind]
            if model in ("", here) and version in ("", ver) and site in ("", at):
                found.append(name)
        return found

    async def sql(self, query: str, *arguments: Any) -> list[dict[str, Any]]:
        """Rows of the ledger's database."""
        connection = await asyncpg.connect(self.ready["postgres"])
        try:
            return [dict(row) for row in await connection.fetch(query, *arguments)]
        finally:
            await connection.close()

    async def rows(self, request_ids: Iterable[str]) -> dict[str, list[dict[str, Any]]]:
        """Ledger rows by request, by attempt."""
        wanted = list(request_ids)
        found: dict[str, list[dict[str, Any]]] = {one: [] for one in wanted}
        for row in await self.sql("SELECT * FROM attempts WHERE request_id = ANY($1) ORDER BY attempt", wanted):
            found[row["request_id"]].append(row)
        return found

    async def final(self, request_id: str, *, within_s: float = 10.0) -> dict[str, Any]:
        """The final row of a request, once it is there."""

        async def look() -> dict[str, Any] | None:
            rows = (await self.rows([request_id]))[request_id]
            return next((row for row in rows if row["final"]), None)

        found: dict[str, Any] = await eventually(look, within_s=within_s, what=f"final row of {request_id}")
        return found

    async def accepted(self, since_s: float) -> dict[str, dict[str, Any]]:
        """Every request that a gateway sent on its road since a moment (wall clock): id → its `Ask`."""
        client = await nats.connect(self.ready["nats"])
        try:
            js = client.jetstream()
            from nats.js.api import ConsumerConfig, DeliverPolicy

            when = time.strftime("%Y-%m-%dT%H:%M:%S", time.gmtime(since_s)) + f".{int(since_s % 1 * 1e6):06d}Z"
            config = ConsumerConfig(deliver_policy=DeliverPolicy.BY_START_TIME, opt_start_time=when)  # type: ignore[arg-type]
            subscription = await js.subscribe("tf.v1.request.received.>", ordered_consumer=True, config=config)
            found: dict[str, dict[str, Any]] = {}
            while True:
                try:
                    message = await subscription.next_msg(timeout=0.7)
                except (nats.errors.TimeoutError, TimeoutError):
                    return found
                ask = json.loads(message.data)["ask"]
                found[ask["request_id"]] = ask
        finally:
            await client.close()

    # --- requests -------------------------------------------------------------------------------------------

    def session(self) -> aiohttp.ClientSession:
        """A client's connections."""
        return aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=120), connector=aiohttp.TCPConnector(limit=0))

    async def ask(
        self,
        session: aiohttp.ClientSession,
        *,
        tokens: int = 8,
        prompt: str = "Say something.",
        model: str = "chat-8b",
        tenant: str = "studio",
        cls: str = "",
        stream: bool = True,
        on_chunk: Callable[[Answer], None] | None = None,
        **more: Any,
    ) -> Answer:
        """Send one chat request and take what comes; never raises for what a fleet may do."""
        body: dict[str, Any] = {
            "model": model,
            "messages": [{"role": "user", "content": prompt}],
            "max_tokens": tokens,
            "stream": stream,
            "tokenfleet_emulator": {"output_tokens": tokens},
            **more,
        }
        if stream:
            body["stream_options"] = {"include_usage": True}
        if cls:
            body["metadata"] = {"class": cls}
        found = Answer(sent_s=time.monotonic())
        try:
            async with session.post(
                f"{self.api}/chat/completions", json=body, headers={"Authorization": f"Bearer {self.keys[tenant]}"}
            ) as response:
                await _take(response, found, on_chunk)
        except (aiohttp.ClientError, ConnectionError, TimeoutError) as error:
            found.broken = type(error).__name__
        found.ended_s = time.monotonic()
        return found

    # --- what must hold -------------------------------------------------------------------------------------

    async def open_things(self) -> dict[str, float]:
        """Every gauge of something open that is not exactly 0, and every engine that works."""
        found: dict[str, float] = {}
        for service in self.ready["metrics"]:
            for name, samples in (await self.metrics(service)).items():
                if OPEN.match(name):
                    found |= {f"{service} {name} {dict(k)}": v for k, v in samples.items() if v != 0}
        for instance in self.ready["emulators"]:
            state = await self.emulator(instance)
            busy = {
                "open_requests": state["open_requests"],
                **{key: state["engine"][key] for key in ("running", "waiting", "arriving", "blocks_used")},
            }
            found |= {f"{instance} {key}": float(value) for key, value in busy.items() if value}
        return found

    async def never_things(self) -> dict[str, float]:
        """Counters that must be 0 and are not."""
        found: dict[str, float] = {}
        for service in self.ready["metrics"]:
            for name, samples in (await self.metrics(service)).items():
                if NEVER.match(name):
                    found |= {f"{service} {name} {dict(k)}": v for k, v in samples.items() if v != 0}
        return found

    async def weights(self) -> dict[str, Weight]:
        """What every service process holds now."""
        found: dict[str, Weight] = {}
        for name, pid in self.ready["pids"].items():
            if name not in self.ready["metrics"]:
                continue
            process = psutil.Process(pid)
            tasks = (await self.metrics(name)).get("tokenfleet_asyncio_tasks", {}).get((), 0.0)
            rss_mib = process.memory_info().rss / 2**20
            found[name] = Weight(pid, process.num_fds(), process.num_threads(), tasks, rss_mib)
        return found

    async def invariants(self, *, within_s: float = 15.0) -> None:
        """What must hold after anything: see the module. Waits for the last things to end."""
        last: dict[str, float] = {}

        async def settled() -> bool:
            nonlocal last
            try:
                last = await self.open_things()
            except (aiohttp.ClientError, OSError, AssertionError) as error:
                last = {repr(error): 1.0}  # a service is being started again
            return not last

        try:
            await eventually(settled, within_s=within_s, what="everything open")
        except AssertionError:
            raise AssertionError(f"still open after everything ended: {last}") from None
        assert await self.never_things() == self.forgiven
        grown: list[str] = []

        async def light() -> bool:
            nonlocal grown
            grown = []
            for name, now in (await self.weights()).items():
                before = self.baseline.get(name)
                if before is None or before.pid != now.pid:
                    continue  # started again since: nothing to compare with
                if now.files > before.files + 12:
                    grown.append(f"{name}: {before.files} → {now.files} files")
                if now.tasks > before.tasks + 6:
                    grown.append(f"{name}: {before.tasks:.0f} → {now.tasks:.0f} tasks")
                if now.rss_mib > before.rss_mib * 1.25 + 48:
                    grown.append(f"{name}: {before.rss_mib:.0f} → {now.rss_mib:.0f} MiB")
            return not grown

        try:
            await eventually(light, within_s=12.0, what="files, tasks and memory")
        except AssertionError:
            raise AssertionError(f"kept after everything ended: {grown}") from None

    async def ledger_agrees(self, answers: Iterable[Answer], *, since_s: float) -> dict[str, list[dict[str, Any]]]:
        """Nothing lost and nothing twice since a moment; the rows of all accepted requests.

        Every accepted request has exactly one final row, every answer that names a request has one, and both tell the
        same story; delivered tokens are never more than the engines made.
        """
        heard = {one.request_id: one for one in answers if one.request_id}
        accepted = await self.accepted(since_s)
        known = set(accepted) | {rid for rid, one in heard.items() if one.status == 200}
        lost: list[str] = []

        async def complete() -> bool:
            nonlocal lost
            rows = await self.rows(known)
            lost = [rid for rid, found in rows.items() if sum(row["final"] for row in found) != 1]
            return not lost

        try:
            await eventually(complete, within_s=25.0, what="one final row each")
        except AssertionError:
            raise AssertionError(f"no final row for {lost}") from None
        rows = await self.rows(known)
        for rid, one in heard.items():
            if one.status == 200 and not one.broken:
                final = next(row for row in rows[rid] if row["final"])
                if final["outcome"] == "owner_lost":
                    continue  # the gateway died between the answer and its word about it
                assert (final["outcome"] == "completed") == one.completed, (one, final)
                # what broke off has no usage: its events are counted, here and there
                assert final["output_tokens"] == (one.usage.get("completion_tokens") or one.tokens), (one, final)
                assert final["served_site"] == one.site
                assert final["attempt"] == one.attempts
        return rows


async def _take(response: aiohttp.ClientResponse, found: Answer, on_chunk: Callable[[Answer], None] | None) -> None:
    headers = response.headers
    found.status = response.status
    found.request_id = headers.get("X-Tokenfleet-Request-Id", "")
    found.site = headers.get("X-Tokenfleet-Site", "")
    found.served = headers.get("X-Tokenfleet-Model", "")
    found.attempts = int(headers.get("X-Tokenfleet-Attempts", "0"))
    found.retry_after = headers.get("Retry-After", "")
    if response.content_type != "text/event-stream":
        body = json.loads(await response.read())
        if "error" in body:
            found.error, found.errors = body["error"], 1
            found.code = str(found.error["code"])
            return
        choice = body["choices"][0]
        found.text, found.finish_reason = choice["message"]["content"], choice["finish_reason"]
        found.usage, found.done = body["usage"], True
        found.tokens = found.usage["completion_tokens"]
        return
    rest = b""
    async for data in response.content.iter_any():
        rest += data
        *events, rest = rest.split(b"\n\n")
        for event in events:
            if not event.startswith(b"data: "):
                continue
            if event == b"data: [DONE]":
                found.done = True
                continue
            chunk = json.loads(event[6:])
            if chunk.get("error"):
                found.error, found.errors = chunk["error"], found.errors + 1
                found.code = str(found.error["code"])
                continue
            if chunk.get("usage"):
                found.usage = chunk["usage"]
            for choice in chunk.get("choices", ()):
                if choice.get("finish_reason"):
                    found.finish_reason = choice["finish_reason"]
                if choice["delta"].get("content"):
                    found.chunks += 1
                    found.text += choice["delta"]["content"]
                    found.tokens = len(found.text)
                    found.first_s = found.first_s or time.monotonic()
        if on_chunk is not None:
            on_chunk(found)
    if not found.done and not found.code:
        # a body that ends in good order in the middle of an answer would deceive its client
        found.broken = "cut"


class Load:
    """Requests at a steady rate, whatever the fleet does (open loop), each remembered."""

    def __init__(self, fleet: Running, *, rate_per_s: float = 4.0, tokens: int = 20, **what: Any) -> None:
        self.answers: list[Answer] = []
        self.began_s = time.time()
        self._fleet = fleet
        self._rate = rate_per_s
        self._tokens = tokens
        self._what = what
        self._number = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._pacer: asyncio.Task[None] | None = None
        self._session = fleet.session()

    async def __aenter__(self) -> "Load":
        self._pacer = asyncio.create_task(self._pace())
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.stop()

    async def stop(self) -> None:
        """Send nothing more, and take what is still on its way."""
        if self._pacer is not None:
            self._pacer.cancel()
            await asyncio.gather(self._pacer, return_exceptions=True)
            self._pacer = None
        if self._tasks:
            _, left = await asyncio.wait(self._tasks, timeout=patience(60.0))
            assert not left, f"{len(left)} requests never ended"
        await self._session.close()

    async def _pace(self) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time()
        while True:
            task = asyncio.create_task(self._one())
            self._tasks.add(task)
            task.add_done_callback(self._tasks.discard)
            due += 1 / self._rate
            await asyncio.sleep(max(0.0, due - loop.time()))

    async def _one(self) -> None:
        self._number += 1
        number = self._number
        answer = await self._fleet.ask(
            self._session,
            tokens=self._tokens,
            prompt=f"Question number {number}: " + "what of it? " * (number % 7),
            # every third is not a stream
            stream=number % 3 != 0,
            **self._what,
        )
        self.answers.append(answer)

    async def completions(self, count: int, *, within_s: float = 20.0) -> None:
        """Wait until so many more requests, sent from now on, have completed."""
        from_s = time.monotonic()

        async def enough() -> bool:
            return sum(one.completed and one.sent_s >= from_s for one in self.answers) >= count

        await eventually(enough, within_s=within_s, what=f"{count} completed requests")

    def first_after(self, moment_s: float) -> float | None:
        """When the first request sent after a moment was answered as it should, seconds after that moment."""
        ends = [one.ended_s - moment_s for one in self.answers if one.completed and one.sent_s >= moment_s]
        return min(ends, default=None)


@contextmanager
def running(data_dir: Path, *options: str) -> Iterator[Running]:
    """Start `tokenfleet up` and stop it, whatever happens."""
    ready_file = data_dir.with_name(f"{data_dir.name}.ready.json")
    log = data_dir.with_name(f"{data_dir.name}.log")
    command = [sys.executable, "-m", "tokenfleet.cli", "up", "--data-dir", str(data_dir), "--ready-file"]
    with log.open("a") as out:
        process = subprocess.Popen([*command, str(ready_file), *options], stdout=out, stderr=out, text=True, cwd=ROOT)
    try:
        end = time.monotonic() + START_S
        while not ready_file.exists():
            assert process.poll() is None, log.read_text()[-3000:]
            assert time.monotonic() < end, log.read_text()[-3000:]
            time.sleep(0.1)
        yield Running(process, ready_file, data_dir, log)
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait(90)
