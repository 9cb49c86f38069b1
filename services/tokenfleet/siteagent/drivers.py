"""How an instance is started and stopped, by kind of actuator: each driver turns an order into what its counterpart
wants.

Decides nothing about which instance and when. `start` returns when the start is under way (the agent's samples show
when it serves), `stop` when the instance is gone or going. Whatever keeps a driver from that is an `ActuatorError`;
an order that is given twice does no harm. Refuses to know plans.

- `emulator`: `POST /power` at an emulated instance's admin port.
- `command`: a program of the operator's, with the order in its arguments and in TOKENFLEET_* variables; exit status 0
is done, its last words are the error otherwise. - `vllm-sleep`: vLLM's sleep mode (`--enable-sleep-mode`,
VLLM_SERVER_DEV_MODE=1): `POST /sleep?level=N`, `POST /wake_up`, `GET /is_sleeping`. A sleeping engine gives its GPU
memory back and keeps its process. - `kubernetes`: the scale of a StatefulSet, `PATCH …/statefulsets/NAME/scale`, with
a pod's own service account. Its replicas are the site's instances of that model version in name order, and it takes
them away from the end.

Sources: vLLM docs "Sleep Mode"; Kubernetes API reference, apps/v1 StatefulSet and autoscaling/v1 Scale.
"""

import asyncio
import contextlib
import os
import ssl
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Protocol
from urllib.parse import quote, urlsplit

import aiohttp

from tokenfleet.fleet import Actuator, Instance

#: where a pod finds its service account
_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_WORDS_MAX = 300


class ActuatorError(RuntimeError):
    """An actuator refused, failed or did not answer; the message says what it said."""


class Driver(Protocol):
    """Starts and stops instances of one site."""

    async def start(self, name: str, declared: Instance) -> None:
        """See to it that it comes up. Raises `ActuatorError`."""
        ...

    async def stop(self, name: str, declared: Instance) -> None:
        """See to it that it goes away. Raises `ActuatorError`."""
        ...


def driver(
    actuator: Actuator,
    session: Callable[[], aiohttp.ClientSession],
    *,
    site: str,
    cold_start_s: Callable[[Instance], float],
    credential: Callable[[str], str],
    wanted: Callable[[str, str], int],
) -> Driver:
    """The driver of a kind. `wanted` says how many replicas of a model version are to run, `credential` a secret."""
    if actuator.kind == "emulator":
        return EmulatorDriver(actuator, session, cold_start_s)
    if actuator.kind == "command":
        return CommandDriver(actuator, site)
    if actuator.kind == "vllm-sleep":
        return SleepDriver(actuator, session, credential)
    return KubernetesDriver(actuator, session, site, wanted)


async def _call(
    session: aiohttp.ClientSession,
    method: str,
    url: str,
    *,
    timeout_s: float,
    headers: Mapping[str, str] | None = None,
    body: object = None,
    tls: ssl.SSLContext | bool = True,
) -> bytes:
    """One HTTP request; its answer's body. Raises `ActuatorError` for anything but a 2xx in time."""
    timeout = aiohttp.ClientTimeout(total=timeout_s)
    try:
        async with session.request(
            method, url, json=body, headers=headers, timeout=timeout, ssl=tls, allow_redirects=False
        ) as answer:
            words = await answer.content.read(1_000_000)
    except TimeoutError:
        raise ActuatorError(f"{method} {url}: no answer within {timeout_s:g} s") from None
    except (aiohttp.ClientError, OSError) as error:
        raise ActuatorError(f"{method} {url}: {error}") from None
    if not 200 <= answer.status < 300:
        raise ActuatorError(f"{method} {url}: {answer.status} {words[:_WORDS_MAX].decode('utf-8', 'replace')}")
    return words


class EmulatorDriver:
    """An emulated instance's power switch."""

    def __init__(
        self,
        actuator: Actuator,
        session: Callable[[], aiohttp.ClientSession],
        cold_start_s: Callable[[Instance], float],
    ) -> None:
        self._actuator, self._session, self._cold_start_s = actuator, session, cold_start_s

    async def start(self, name: str, declared: Instance) -> None:
        await self._power(name, declared, {"on": True, "cold_start_ms": 1000.0 * self._cold_start_s(declared)})

    async def stop(self, name: str, declared: Instance) -> None:
        await self._power(name, declared, {"on": False})

    async def _power(self, name: str, declared: Instance, order: dict[str, object]) -> None:
        if not declared.admin_port:
            raise ActuatorError(f"{name} has no admin_port")
        host = urlsplit(declared.url).hostname or "127.0.0.1"
        url = f"http://{host}:{declared.admin_port}/power"
        await _call(self._session(), "POST", url, timeout_s=self._actuator.timeout_s, body=order)


class CommandDriver:
    """A program of the operator's."""

    def __init__(self, actuator: Actuator, site: str) -> None:
        self._actuator, self._site = actuator, site

    async def start(self, name: str, declared: Instance) -> None:
        await self._run("start", name, declared)

    async def stop(self, name: str, declared: Instance) -> None:
        await self._run("stop", name, declared)

    async def _run(self, action: str, name: str, declared: Instance) -> None:
        facts = {
            "action": action,
            "instance": name,
            "model": declared.model,
            "version": declared.version,
            "url": declared.url,
            "site": self._site,
        }
        # no shell: a name with a space or a quote is one argument
        words = [word.format(**facts) for word in self._actuator.command]
        environment = {**os.environ, **{f"TOKENFLEET_{key.upper()}": value for key, value in facts.items()}}
        for secret in ("TOKENFLEET_SECRET", "TOKENFLEET_NATS_PASSWORD", "TOKENFLEET_POSTGRES_URL"):
            environment.pop(secret, None)
        try:
            process = await asyncio.create_subprocess_exec(
                *words,
                env=environment,
                stdin=asyncio.subprocess.DEVNULL,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.STDOUT,
                start_new_session=True,
            )
        except OSError as error:
            raise ActuatorError(f"{words[0]}: {error.strerror or error}") from None
        try:
            said, _ = await asyncio.wait_for(process.communicate(), self._actuator.timeout_s)
        except TimeoutError:
            raise ActuatorError(f"{words[0]}: not done within {self._actuator.timeout_s:g} s: killed") from None
        finally:
            if process.returncode is None:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, 9)
                await process.wait()
        if process.returncode:
            last = said[-_WORDS_MAX:].decode("utf-8", "replace").strip()
            raise ActuatorError(f"{words[0]}: exit status {process.returncode}: {last}")


class SleepDriver:
    """vLLM's sleep mode."""

    def __init__(
        self, actuator: Actuator, session: Callable[[], aiohttp.ClientSession], credential: Callable[[str], str]
    ) -> None:
        self._actuator, self._session, self._credential = actuator, session, credential

    async def start(self, name: str, declared: Instance) -> None:
        if await self._sleeping(declared):
            await self._post(declared, "/wake_up")

    async def stop(self, name: str, declared: Instance) -> None:
        if not await self._sleeping(declared):
            await self._post(declared, f"/sleep?level={self._actuator.sleep_level}")

    async def _sleeping(self, declared: Instance) -> bool:
        said = await self._ask(declared, "GET", "/is_sleeping")
        return b"true" in said.lower()

    async def _post(self, declared: Instance, path: str) -> None:
        await self._ask(declared, "POST", path)

    async def _ask(self, declared: Instance, method: str, path: str) -> bytes:
        secret = self._credential(declared.credential)
        headers = {"Authorization": f"Bearer {secret}"} if secret else None
        url = declared.url.rstrip("/") + path
        return await _call(self._session(), method, url, timeout_s=self._actuator.timeout_s, headers=headers)


class KubernetesDriver:
    """The scale of a StatefulSet per model version."""

    def __init__(
        self,
        actuator: Actuator,
        session: Callable[[], aiohttp.ClientSession],
        site: str,
        wanted: Callable[[str, str], int],
        account: Path = _ACCOUNT,
    ) -> None:
        self._actuator, self._session, self._site, self._wanted = actuator, session, site, wanted
        self._account = account

    async def start(self, name: str, declared: Instance) -> None:
        await self._scale(declared)

    async def stop(self, name: str, declared: Instance) -> None:
        await self._scale(declared)

    async def _scale(self, declared: Instance) -> None:
        base = self._actuator.api_url
        if not base:
            host, port = os.environ.get("KUBERNETES_SERVICE_HOST"), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
            if not host:
                raise ActuatorError("not in a pod (no KUBERNETES_SERVICE_HOST), and the actuator has no api_url")
            base = f"https://{host}:{port}"
        words = {"model": declared.model, "version": declared.version, "site": self._site}
        name = self._actuator.stateful_set.format(**words).lower()
        path = f"/apis/apps/v1/namespaces/{quote(self._actuator.namespace)}/statefulsets/{quote(name)}/scale"
        headers = {"Content-Type": "application/merge-patch+json"}
        try:
            token = (self._account / "token").read_text(encoding="utf-8").strip()
        except OSError:
            token = ""
        if token:
            headers["Authorization"] = f"Bearer {token}"
        authority = self._account / "ca.crt"
        tls: ssl.SSLContext | bool = True
        if base.startswith("https://") and authority.is_file():
            tls = await asyncio.to_thread(ssl.create_default_context, cafile=str(authority))
        await _call(
            self._session(),
            "PATCH",
            base.rstrip("/") + path,
            timeout_s=self._actuator.timeout_s,
            headers=headers,
            body={"spec": {"replicas": self._wanted(declared.model, declared.version)}},
            tls=tls,
        )
