"""Drivers against what they drive: an emulated engine, a program, vLLM's sleep API and Kubernetes' scale on HTTP."""

import asyncio
import json
import sys
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import aiohttp
import msgspec
import pytest
from aiohttp import web

from tokenfleet import fleet as fleets
from tokenfleet.effects import Effect, Publish
from tokenfleet.emulator import Emulator
from tokenfleet.fleet import Actuator, Fleet, Instance
from tokenfleet.siteagent import drivers
from tokenfleet.siteagent.core import SiteAgentCore
from tokenfleet.siteagent.drivers import ActuatorError, CommandDriver, EmulatorDriver, KubernetesDriver, SleepDriver
from tokenfleet.siteagent.service import Agent
from tokenfleet.siteagent.settings import Knobs
from tokenfleet_schemas.capacity import CapacityReported
from tokenfleet_schemas.event import Event
from tokenfleet_schemas.plan import PlanApplied, PlanIssued, Target

DECLARED = Instance(model="chat-8b", version="1", url="http://127.0.0.1:9", credential="engines")


@pytest.fixture
async def session() -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession() as made:
        yield made


class Server:
    """A small real HTTP server that writes down what it is asked."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, str, str, Any]] = []
        self.answers: dict[str, tuple[int, Any]] = {}
        self.url = ""
        self._runner: web.AppRunner | None = None

    async def start(self) -> None:
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(app, access_log=None)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        if self._runner is not None:
            await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        body = await request.read()
        secret = request.headers.get("Authorization", "")
        self.asked.append((request.method, request.path_qs, secret, json.loads(body) if body else None))
        status, answer = self.answers.get(request.path, (200, {}))
        if callable(answer):
            answer = answer()
        return web.json_response(answer, status=status)


@pytest.fixture
async def server() -> AsyncIterator[Server]:
    made = Server()
    await made.start()
    yield made
    await made.stop()


class TestSleep:
    """vLLM's sleep mode, as its documentation has it."""

    async def test_sleeps_once_and_wakes_once(self, server: Server, session: aiohttp.ClientSession) -> None:
        """Ordered twice, an engine is put to sleep once: a second /sleep would wait for ever in some versions."""
        asleep = False
        server.answers["/is_sleeping"] = (200, lambda: {"is_sleeping": asleep})
        actuator = Actuator(kind="vllm-sleep", sleep_level=2)
        driver = SleepDriver(actuator, lambda: session, lambda name: f"secret of {name}")
        declared = msgspec.structs.replace(DECLARED, url=server.url)
        await driver.stop("b-0", declared)
        asleep = True
        await driver.stop("b-0", declared)
        await driver.start("b-0", declared)
        asleep = False
        await driver.start("b-0", declared)
        orders = [(method, path) for method, path, *_ in server.asked if path != "/is_sleeping"]
        assert orders == [("POST", "/sleep?level=2"), ("POST", "/wake_up")]
        assert {secret for _, _, secret, _ in server.asked} == {"Bearer secret of engines"}

    async def test_an_engine_without_sleep_mode_is_an_error_that_says_so(
        self, server: Server, session: aiohttp.ClientSession
    ) -> None:
        """Started without --enable-sleep-mode: 404, not a plan that silently never comes true."""
        server.answers["/is_sleeping"] = (404, {"detail": "Not Found"})
        driver = SleepDriver(Actuator(kind="vllm-sleep"), lambda: session, lambda _: "")
        with pytest.raises(ActuatorError, match="404"):
            await driver.stop("b-0", msgspec.structs.replace(DECLARED, url=server.url))

    async def test_a_silent_engine_fails_in_time(self, session: aiohttp.ClientSession) -> None:
        """A hung engine must not hold its agent."""
        held: list[asyncio.StreamWriter] = []
        silent = await asyncio.start_server(lambda _reader, writer: held.append(writer), "127.0.0.1", 0)
        url = f"http://127.0.0.1:{silent.sockets[0].getsockname()[1]}"
        driver = SleepDriver(Actuator(kind="vllm-sleep", timeout_s=0.2), lambda: session, lambda _: "")
        with pytest.raises(ActuatorError, match="no answer within"):
            await driver.start("b-0", msgspec.structs.replace(DECLARED, url=url))
        for writer in held:
            writer.close()
        silent.close()
        await silent.wait_closed()


class TestCommand:
    """A program of the operator's."""

    def driver(self, *command: str, timeout_s: float = 10.0) -> CommandDriver:
        return CommandDriver(Actuator(kind="command", command=command, timeout_s=timeout_s), "b")

    async def test_it_is_told_all_facts_and_no_secrets(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Arguments and environment name the order; the fleet's secret stays with the agent."""
        monkeypatch.setenv("TOKENFLEET_SECRET", "do not tell")
        out = tmp_path / "out"
        code = "import json,os,sys; json.dump([sys.argv[2:], dict(os.environ)], open(sys.argv[1], 'w'))"
        driver = self.driver(
            sys.executable, "-c", code, str(out), "{action}", "{instance} of {model}@{version}", "{url}"
        )
        await driver.start("b-0; rm -rf /", DECLARED)
        arguments, environment = json.loads(out.read_text())
        assert arguments == ["start", "b-0; rm -rf / of chat-8b@1", "http://127.0.0.1:9"]
        assert environment["TOKENFLEET_ACTION"] == "start"
        assert (environment["TOKENFLEET_SITE"], environment["TOKENFLEET_MODEL"]) == ("b", "chat-8b")
        assert "TOKENFLEET_SECRET" not in environment

    async def test_a_failure_carries_its_last_words(self) -> None:
        """Exit status and what it printed: an operator reads the log, not the source."""
        with pytest.raises(ActuatorError, match="exit status 3: quota exceeded"):
            await self.driver(sys.executable, "-c", "print('quota exceeded'); raise SystemExit(3)").stop(
                "b-0", DECLARED
            )

    async def test_one_that_hangs_is_killed_with_its_children(self, tmp_path: Path) -> None:
        """`kubectl wait` for ever: the whole group ends, and the order has failed."""
        with pytest.raises(ActuatorError, match="killed"):
            await self.driver("/bin/sh", "-c", "sleep 600 & wait", timeout_s=0.2).start("b-0", DECLARED)

    async def test_one_that_does_not_exist_is_an_error(self) -> None:
        """A typo in the fleet file."""
        with pytest.raises(ActuatorError, match="No such file"):
            await self.driver("/no/such/program").start("b-0", DECLARED)


class TestKubernetes:
    """The scale of a StatefulSet."""

    async def test_it_patches_the_scale_with_the_wanted_count(
        self, server: Server, session: aiohttp.ClientSession, tmp_path: Path
    ) -> None:
        """One StatefulSet per model version; a pod's own account speaks."""
        (tmp_path / "token").write_text("account\n")
        actuator = Actuator(
            kind="kubernetes", api_url=server.url, namespace="llm", stateful_set="vllm-{model}-v{version}"
        )
        driver = KubernetesDriver(actuator, lambda: session, "b", lambda _model, _version: 3, account=tmp_path)
        await driver.start("b-2", DECLARED)
        path = "/apis/apps/v1/namespaces/llm/statefulsets/vllm-chat-8b-v1/scale"
        assert server.asked == [("PATCH", path, "Bearer account", {"spec": {"replicas": 3}})]

    async def test_a_refusal_is_an_error(self, server: Server, session: aiohttp.ClientSession, tmp_path: Path) -> None:
        """The account lacks the right: 403 with the reason."""
        actuator = Actuator(kind="kubernetes", api_url=server.url)
        server.answers["/apis/apps/v1/namespaces/default/statefulsets/chat-8b-1/scale"] = (403, {"reason": "Forbidden"})
        driver = KubernetesDriver(actuator, lambda: session, "b", lambda _model, _version: 1, account=tmp_path)
        with pytest.raises(ActuatorError, match=r"403.*Forbidden"):
            await driver.stop("b-1", DECLARED)

    async def test_outside_of_a_pod_it_says_what_is_missing(
        self, session: aiohttp.ClientSession, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Neither an address in the file nor a pod's environment."""
        monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
        driver = KubernetesDriver(Actuator(kind="kubernetes"), lambda: session, "b", lambda _model, _version: 1)
        with pytest.raises(ActuatorError, match="api_url"):
            await driver.start("b-1", DECLARED)


FLEET = """
[fleet]
name = "test"
default_class = "chat"
[planning]
mode = "on"
cold_start_s = 60
time_scale = 300.0
[classes.chat]
[models.m]
versions = ["1"]
default_version = "1"
max_model_len = 8192
[sites.b]
zone = "eu"
gpus = 2
actuator = { kind = "emulator" }
[sites.b.instances.b1]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
cold_start_s = 60.0
[sites.b.instances.b2]
model = "m"
version = "1"
url = "http://127.0.0.1:0"
profile = "8b-h100"
cold_start_s = 60.0
"""


class Feeding:
    """The runner's place: effects are written down or performed."""

    def __init__(self, core: SiteAgentCore) -> None:
        self.core = core
        self.said: list[Event] = []
        self.changed = asyncio.Event()
        self.perform: Callable[[Effect], None] = lambda _effect: None
        self._timer: asyncio.TimerHandle | None = None

    def feed(self, event: Event) -> None:
        self._take(self.core.handle(event, self.now_ms()))

    def now_ms(self) -> float:
        return asyncio.get_running_loop().time() * 1000.0

    def _take(self, effects: Any) -> None:
        for effect in list(effects):
            if isinstance(effect, Publish):
                self.said.append(effect.event)
            elif type(effect).__name__ == "Actuate":
                self.perform(effect)
            elif type(effect).__name__ == "WakeAt":
                if self._timer is not None:
                    self._timer.cancel()
                delay_s = max(0.0, (effect.at_ms - self.now_ms()) / 1000.0)
                self._timer = asyncio.get_running_loop().call_later(delay_s, self._wake)
        self.changed.set()

    def _wake(self) -> None:
        self._take(self.core.wake(self.now_ms()))

    def close(self) -> None:
        if self._timer is not None:
            self._timer.cancel()

    async def until(self, check: Callable[[], bool]) -> None:
        async with asyncio.timeout(20):
            while not check():
                self.changed.clear()
                await self.changed.wait()

    def applied(self) -> PlanApplied | None:
        return next((one for one in reversed(self.said) if isinstance(one, PlanApplied)), None)


async def _site() -> tuple[Emulator, Fleet]:
    emulator = Emulator(fleets.parse(FLEET.encode()))
    addresses = await emulator.start()
    text = FLEET
    for name in ("b1", "b2"):
        admin = addresses[name]["admin"].rpartition(":")[2]
        text = text.replace('url = "http://127.0.0.1:0"', f'url = "{addresses[name]["url"]}"\nadmin_port = {admin}', 1)
    return emulator, fleets.parse(text.encode())


def _plan(revision: int, replicas: int) -> PlanIssued:
    targets = (Target(version="1", replicas=replicas),)
    return PlanIssued(id=f"p{revision}", term=1, site="b", model="m", revision=revision, targets=targets)


async def test_an_agent_makes_a_plan_true_on_emulated_engines() -> None:
    """Scale to one, to none and back: drained, stopped, started after the cold start, and every step reported."""
    emulator, fleet = await _site()
    core = SiteAgentCore(fleet, "b", began="test")
    feeding = Feeding(core)
    knobs = Knobs(poll_ms=100.0, report_ms=100.0, unreachable_ms=300.0, identity_ms=200.0)
    agent = Agent(core, feeding, {}, knobs)
    feeding.perform = agent.perform

    def ready() -> int:
        last = {one.instance: one for one in feeding.said if isinstance(one, CapacityReported)}
        return sum(one.ready for one in last.values())

    try:
        agent.follow(fleet)
        await feeding.until(lambda: ready() == 2)
        feeding.feed(_plan(1, 1))
        await feeding.until(lambda: (one := feeding.applied()) is not None and one.ok and one.revision == 1)
        assert ready() == 1
        reasons = {one.reason for one in feeding.said if isinstance(one, CapacityReported)}
        assert "draining" in reasons
        await feeding.until(lambda: sum(one.powered for one in emulator.instances.values()) == 1)
        feeding.feed(_plan(2, 0))
        await feeding.until(lambda: not any(one.powered for one in emulator.instances.values()))
        feeding.feed(_plan(3, 2))
        await feeding.until(lambda: (one := feeding.applied()) is not None and one.ok and one.revision == 3)
        assert ready() == 2
        reasons = {one.reason for one in feeding.said if isinstance(one, CapacityReported)}
        assert {"draining", "stopped", "starting"} <= reasons
        # half a second of it were two cold starts of 60 s at 300 times the pace: GPUs count from the order on
        assert all(one.powered_s > 0 for one in emulator.instances.values())
    finally:
        await agent.stop()
        feeding.close()
        await emulator.stop()


async def test_an_unreachable_actuator_is_said_and_counted(session: aiohttp.ClientSession) -> None:
    """The admin port is gone: the plan is not applied, the agent says why, and its gauge is an alert's."""
    emulator, fleet = await _site()
    site = fleet.sites["b"]
    deaf = {name: msgspec.structs.replace(one, admin_port=9) for name, one in site.instances.items()}
    broken = msgspec.structs.replace(site, instances=deaf)
    fleet = msgspec.structs.replace(fleet, sites={"b": broken})
    core = SiteAgentCore(fleet, "b", began="test")
    feeding = Feeding(core)
    agent = Agent(core, feeding, {}, Knobs(poll_ms=100.0, report_ms=100.0, unreachable_ms=300.0))
    feeding.perform = agent.perform
    try:
        for one in emulator.instances.values():
            await one.power(on=False)
        agent.follow(fleet)
        await feeding.until(lambda: all(hand.seen for hand in core.actuation.hands.values()))
        feeding.feed(_plan(1, 1))
        await feeding.until(lambda: (one := feeding.applied()) is not None and "POST" in one.detail)
        assert sum(core.gauges()["siteagent_actuator_failing"].values()) >= 1
        found = feeding.applied()
        assert found is not None
        assert not found.ok
    finally:
        await agent.stop()
        feeding.close()
        await emulator.stop()


def test_every_kind_has_its_driver(session: aiohttp.ClientSession) -> None:
    """A kind in the fleet file that nobody drives would be found by an operator at night."""
    kinds: dict[Any, type] = {
        "emulator": EmulatorDriver,
        "command": CommandDriver,
        "vllm-sleep": SleepDriver,
        "kubernetes": KubernetesDriver,
    }
    for kind, expected in kinds.items():
        made = drivers.driver(
            Actuator(kind=kind),
            lambda: session,
            site="b",
            cold_start_s=lambda _declared: 1.0,
            credential=lambda _name: "",
            wanted=lambda _model, _version: 1,
        )
        assert isinstance(made, expected)
