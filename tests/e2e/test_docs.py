"""The documents, executed: every command that README.md and docs/operations.md show is run here as it stands.

One fleet (`tokenfleet up`, what `make up` runs) under a home directory of its own serves all documents. How blocks
are read:

- ```sh: run by bash in the repository's root; it must exit 0. Variables stay for the document's later blocks.
- ```console: lines after `$ ` are run likewise; the lines below each must be found in its output in that order, `…`
  standing for anything and spaces for any spaces.
- ```python: run by this interpreter.
- `make TARGET` is only resolved (`make -n`): the suite runs inside of one.
- ```toml must parse. Other blocks (text, promql) are for reading.

A comment before a block says what it needs:

- `<!-- test: stopped -->`: run while the fleet is stopped; it is started again afterwards.
- `<!-- test: until-output -->`: ended by Ctrl-C once it has printed something.
- `<!-- test: service -->`: a service on `TOKENFLEET_METRICS_PORT`; ended by SIGTERM once it is ready.
- `<!-- test: docker -->`: run in a copy of the repository by `make test-compose`, where a Docker engine answers.
"""

import ast
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
import urllib.error
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from tokenfleet import fleet as fleets
from tokenfleet.local.ports import free_ports
from tokenfleet.runtime.settings import Settings

ROOT = Path(__file__).parents[2]
EXECUTED = ("README.md", "docs/operations.md")
DOCUMENTS = sorted(
    str(path.relative_to(ROOT))
    for path in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benchmarks").rglob("*.md")]
)
START_S = 150.0
COMMAND_S = 150.0
#: a command that builds the image
BUILD_S = 1200.0

_FENCE = re.compile(r"^```(\w*)$")
_DIRECTIVE = re.compile(r"^<!-- test: ([\w-]+) -->$")
_DIRECTIVES = {"", "stopped", "until-output", "service", "docker"}


@dataclass(frozen=True, kw_only=True)
class Block:
    """One fenced block."""

    language: str
    text: str
    directive: str
    place: str


def blocks(document: str) -> list[Block]:
    """The fenced blocks of a document, in order."""
    found: list[Block] = []
    directive, opened, lines = "", None, list[str]()
    for number, line in enumerate((ROOT / document).read_text(encoding="utf-8").splitlines(), start=1):
        if opened is not None:
            if line == "```":
                found.append(
                    Block(language=opened, text="\n".join(lines), directive=directive, place=f"{document}:{number}")
                )
                directive, opened, lines = "", None, []
            else:
                lines.append(line)
        elif match := _FENCE.match(line):
            opened = match[1]
        elif match := _DIRECTIVE.match(line):
            directive = match[1]
            assert directive in _DIRECTIVES, f"{document}:{number}: no such directive"
        elif line.strip():
            directive = ""
    assert opened is None, f"{document}: a block does not end"
    return found


class LocalFleet:
    """What `make up` runs, under a home of its own."""

    def __init__(self, home: Path) -> None:
        self.home = home
        kept = {k: v for k, v in os.environ.items() if not k.startswith(("TOKENFLEET_", "XDG_", "OPENAI_", "METRICS_"))}
        self.environment = {
            **kept,
            "HOME": str(home),
            "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
        }
        self._process: subprocess.Popen[str] | None = None
        self._log = home / "up.log"

    def start(self) -> None:
        """Up, and all of it answers."""
        ready = self.home / "ready.json"
        ready.unlink(missing_ok=True)
        with self._log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tokenfleet.cli", "up", "--ready-file", str(ready)],
                cwd=ROOT, env=self.environment, stdout=log, stderr=log, text=True,
            )  # fmt: skip
        end = time.monotonic() + START_S
        while not ready.exists():
            assert self._process.poll() is None, self._log.read_text()[-3000:]
            assert time.monotonic() < end, self._log.read_text()[-3000:]
            time.sleep(0.1)

    def stop(self) -> None:
        """Ctrl-C."""
        if self._process is not None and self._process.poll() is None:
            self._process.send_signal(signal.SIGINT)
            self._process.wait(60)


class Reader:
    """Somebody who works through one document in one shell."""

    def __init__(
        self, environment: dict[str, str], state: Path, cwd: Path = ROOT, *, patience_s: float = COMMAND_S
    ) -> None:
        self.environment = environment
        self.state = state
        self.patience_s = patience_s
        self.cwd = cwd
        state.write_text("")

    def script(self, text: str) -> str:
        """The block with the variables of earlier ones; `make` is only resolved."""
        text = re.sub(r"(?m)^make (?!-)", "make -n ", text)
        keep = f"declare -p | grep -v '^declare -[a-zA-Z]*r' > {self.state}"
        return f"{self._before()}{text}\nset +euo pipefail\n{keep}\n"

    def _before(self) -> str:
        # exported or not, as the reader's own shell would have them
        return f". {self.state} 2>/dev/null\nset -euo pipefail\n"

    def run(self, text: str, place: str) -> str:
        """Run it to its end; what it printed."""
        process = subprocess.Popen(
            ["bash", "-c", self.script(text)],
            cwd=self.cwd, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip
        try:
            out, _ = process.communicate(timeout=self.patience_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            out, _ = process.communicate()
            pytest.fail(f"{place}: not done after {self.patience_s:.0f} s:\n{text}\n---\n{out[-3000:]}")
        assert process.returncode == 0, f"{place}: exit code {process.returncode}:\n{text}\n---\n{out[-3000:]}"
        return out

    def until_output(self, text: str, place: str) -> None:
        """Run it until it has printed a line, then press Ctrl-C."""
        process = self._start(text)
        assert process.stdout is not None
        try:
            assert process.stdout.readline().strip(), f"{place}: {process.stdout.read()}"
            os.killpg(process.pid, signal.SIGINT)
            process.communicate(timeout=30)
        finally:
            self._kill(process)

    def service(self, text: str, place: str) -> None:
        """Run a service until it is ready, then end it in order; its ports are free ones."""
        found = re.search(r"TOKENFLEET_METRICS_PORT=(\d+)", text)
        assert found is not None, f"{place}: names no port to ask whether it is ready"
        wished = re.findall(r"_PORT=(\d+)", text)
        ports = dict(zip(wished, free_ports(len(wished)), strict=True))
        text = re.sub(r"(_PORT=)(\d+)", lambda one: f"{one[1]}{ports[one[2]]}", text)
        # bash hands the service its own process, and with it the signal
        head, _, last = text.rstrip().rpartition("\n")
        process = self._start(f"{head}\nexec {last}")
        try:
            end = time.monotonic() + 60
            while not _answers(f"http://127.0.0.1:{ports[found[1]]}/readyz"):
                assert process.poll() is None, f"{place}: {process.communicate()[0]}"
                assert time.monotonic() < end, f"{place}: not ready"
                time.sleep(0.1)
            process.terminate()
            out, _ = process.communicate(timeout=60)
            assert process.returncode == 0, f"{place}: {out}"
        finally:
            self._kill(process)

    def _start(self, text: str) -> "subprocess.Popen[str]":
        return subprocess.Popen(
            ["bash", "-c", f"{self._before()}{text}\n"],
            cwd=self.cwd, env=self.environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
            start_new_session=True,
        )  # fmt: skip

    def _kill(self, process: "subprocess.Popen[str]") -> None:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.communicate()

    def work_through(self, block: Block) -> None:
        """One block that needs no more than a shell."""
        if block.language == "console":
            self._console(block)
        elif block.language == "python":
            self.run(f"python - <<'END_OF_BLOCK'\n{block.text}\nEND_OF_BLOCK", block.place)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "sh":
            if block.directive == "until-output":
                self.until_output(block.text, block.place)
            elif block.directive == "service":
                self.service(block.text, block.place)
            else:
                self.run(block.text, block.place)

    def _console(self, block: Block) -> None:
        for session in re.split(r"(?m)^\$ ", block.text)[1:]:
            command, *expected = session.rstrip("\n").split("\n")
            lines = iter(self.run(command, block.place).splitlines())
            said = []
            for line in expected:
                pattern = re.compile(_pattern(line))
                for one in lines:
                    said.append(one)
                    if pattern.fullmatch(one.rstrip()):
                        break
                else:
                    pytest.fail(f"{block.place}: $ {command}\nno line like {line!r} in\n" + "\n".join(said))


def _pattern(line: str) -> str:
    """An expected line as a regular expression."""
    parts = [r"\s+".join(re.escape(word) for word in part.split()) for part in line.split("…")]
    return r"\s*" + ".*".join(parts)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalFleet]:
    fleet = LocalFleet(tmp_path_factory.mktemp("home"))
    try:
        fleet.start()
        yield fleet
    finally:
        fleet.stop()


@pytest.mark.timeout(900)
@pytest.mark.parametrize("document", EXECUTED)
def test_every_command_works_as_pasted(fleet: LocalFleet, tmp_path: Path, document: str) -> None:
    """An option was renamed, and the page that an operator opens at night showed the old one."""
    reader = Reader(fleet.environment, tmp_path / "shell")
    stopped = False
    for block in blocks(document):
        if block.directive == "docker":
            continue
        if stopped != (block.directive == "stopped"):
            stopped = not stopped
            if stopped:
                fleet.stop()
            else:
                fleet.start()
        reader.work_through(block)
    if stopped:
        fleet.start()


def _has_image(name: str) -> bool:
    return subprocess.run(["docker", "image", "inspect", name], capture_output=True, check=False).returncode == 0


@pytest.mark.compose
@pytest.mark.timeout(1800)
def test_every_docker_command_works_as_pasted(tmp_path: Path) -> None:
    """The same for the commands of those who run containers; one project, in a copy of the repository."""
    if subprocess.run(["docker", "version"], capture_output=True, check=False).returncode != 0:
        pytest.skip("no Docker engine answers here")
    copy = tmp_path / "copy"
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.decode()
    for name in filter(None, listed.split("\0")):
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, copy / name)
    api, nats = free_ports(2)
    postgres = next((i for i in ("postgres:18", "postgres:17") if _has_image(i)), "postgres:18")
    environment = {
        "POSTGRES_IMAGE": postgres,
        **os.environ,
        "COMPOSE_PROJECT_NAME": f"tokenfleet-docs-{os.getpid()}",
        "TF_API_PORT": str(api),
        "TF_NATS_PORT": str(nats),
        "TF_METRICS_PREFIX": next(str(p // 100) for p in free_ports(50) if p % 100 < 50),
    }
    reader = Reader(environment, tmp_path / "shell", copy, patience_s=BUILD_S)
    try:
        for document in EXECUTED:
            for block in blocks(document):
                if block.directive == "docker":
                    reader.work_through(block)
    finally:
        subprocess.run(
            ["docker", "compose", "down", "--volumes", "--remove-orphans"],
            cwd=copy, env=environment, capture_output=True, timeout=300, check=False,
        )  # fmt: skip


# ── what can be checked without a fleet ─────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(document: str) -> None:
    """A page was renamed, and nobody found it again."""
    text = (ROOT / document).read_text(encoding="utf-8")
    prose = re.sub(r"(?ms)^```.*?^```$", "", text)
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", prose):
        if "://" not in target:
            assert ((ROOT / document).parent / target).exists(), f"{document}: {target}"


def test_the_readme_names_every_setting() -> None:
    """A variable that the README does not name is found by reading code; one that it invents, never."""
    rows = re.findall(r"(?m)^\| (`TOKENFLEET_.*?) \|", (ROOT / "README.md").read_text(encoding="utf-8"))
    named = {name for row in rows for name in re.findall(r"`(TOKENFLEET_\w+)`", row)}
    assert named == {f"TOKENFLEET_{field.upper()}" for field in Settings.__struct_fields__}


def test_every_record_is_listed() -> None:
    """A decision that the index does not list is taken a second time."""
    folder = ROOT / "docs" / "adr"
    listed = re.findall(r"\]\((\d{4}-[\w-]+\.md)\)", (folder / "README.md").read_text(encoding="utf-8"))
    assert listed == sorted(path.name for path in folder.glob("0*.md"))


ANNOTATED = ROOT / "docs" / "fleet.toml"


def test_the_annotated_fleet_file_says_the_true_defaults() -> None:
    """A comment called 30 s the default when it had long been 15: a line marked so may be left out."""
    text = ANNOTATED.read_text(encoding="utf-8")
    whole = fleets.parse(text.encode())
    marked = re.findall(r"(?m)^\w+ = .*# default\b.*$", text)
    assert len(marked) > 15
    for line in marked:
        assert fleets.parse(text.replace(line, "", 1).encode()) == whole, line
    for struct, key, said in (
        (fleets.Instance, "token_budget", "2048"),
        (fleets.Instance, "max_sequences", "256"),
        (fleets.Instance, "kv_tokens", "0"),
        (fleets.ServiceClass, "patience_ms", "30000"),
        (fleets.ServiceClass, "share", "1.0"),
        (fleets.Site, "gpus", "0"),
    ):
        default = next(field.default for field in msgspec.structs.fields(struct) if field.name == key)
        assert default == float(said), key
        assert re.search(rf"(?m)^{key} = .*#.*\b{re.escape(said)}\b.*$", text), key


def test_the_annotated_fleet_file_has_every_key() -> None:
    """A key that the file does not show is found by nobody."""
    text = ANNOTATED.read_text(encoding="utf-8")
    for struct in (
        fleets.FleetInfo,
        fleets.Policy,
        fleets.Site,
        fleets.Instance,
        fleets.Model,
        fleets.ServiceClass,
        fleets.Planning,
        fleets.Actuator,
        fleets.Promise,
    ):
        for key in struct.__struct_fields__:
            assert re.search(rf"(?m)^{key} = |^\[\w+\.[\w-]+\.{key}\b", text), f"{struct.__name__}.{key}"
    for key in fleets.Tenant.__struct_fields__:
        assert re.search(rf"(?m)^{key} = ", text[text.index("[tenants.") :]), key


def test_the_example_of_a_real_engine_is_right() -> None:
    """It is copied by everybody who leaves the emulators behind."""
    text = ANNOTATED.read_text(encoding="utf-8")
    example = re.search(r"(?ms)^# example: a real engine\n(.*?)^# end of example$", text)
    assert example is not None
    lines = re.sub(r"(?m)^# ", "", example[1])
    fleet = fleets.parse(text.replace(example[0], lines).encode())
    assert fleet.sites["c"].instances["c-doc-1"].credential == "c-doc"


# ── metrics ─────────────────────────────────────────────────────────────────────────────────────────────────────────

METRICS = ROOT / "docs" / "metrics.md"
#: what a core notes becomes a counter of this name (`runtime.runner`); a gateway's notes share one counter
NOTING = ("accountant", "fleetmind", "siteagent", "slomax", "tokenpilot")


def _documented() -> set[str]:
    """Names of Prometheus metrics in tables of docs/metrics.md."""
    cells = re.findall(r"(?m)^\| (`(?:tokenfleet|process)_[^|]*) \|", METRICS.read_text(encoding="utf-8"))
    return {name for cell in cells for name in re.findall(r"`((?:tokenfleet|process)_\w+)", cell)}


def _noted() -> set[str]:
    """Counters that appear when something happens for the first time."""
    names = set[str]()
    for service in NOTING:
        for path in (ROOT / "services" / "tokenfleet" / service).glob("*.py"):
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Note":
                    name = node.args[0]
                    assert isinstance(name, ast.Constant), f"{path.name}:{node.lineno}: a note without a fixed name"
                    names.add(f"tokenfleet_{name.value!s}_total")
    return names


@pytest.mark.timeout(300)
def test_every_metric_is_documented(fleet: LocalFleet) -> None:
    """A dashboard showed a metric that had been renamed, and an alert on it never fired."""
    ready = json.loads((fleet.home / "ready.json").read_text())
    seen = set[str]()
    for url in ready["metrics"].values():
        with urllib.request.urlopen(url, timeout=10) as answer:
            seen |= set(re.findall(r"(?m)^# TYPE (\w+) ", answer.read().decode()))
    # the client library adds the time at which each counter began
    seen = {name for name in seen if not name.endswith("_created")}
    documented = _documented()
    assert seen | _noted() == documented
    text = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    families = documented | {f"{name}_{part}" for name in documented for part in ("bucket", "sum", "count")}
    assert set(re.findall(r"tokenfleet_[a-z_]+(?![a-z_]*[(|\\])", text)) - {"tokenfleet_"} <= families
