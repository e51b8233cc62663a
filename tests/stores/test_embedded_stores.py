"""The stores that need no Docker: they start, keep their data, refuse what they must, and leave nothing behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import asyncpg
import pytest
import redis
from store_servers import VARIABLE, short_folder
from waiting import eventually

from agentrun.dev import binaries
from agentrun.dev.stores import ProgramMissingError, Stores, StoresError, StoreSettings, StoreUrls, find_postgres, stores

pytestmark = [
    pytest.mark.usefixtures("store_programs"),
    pytest.mark.skipif(sys.platform != "linux", reason="looks for left-over processes in /proc"),
]

as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root hands Postgres to another account")

OWNER = """
import json, sys
from pathlib import Path
from agentrun.dev.stores import StoresError, stores
try:
    with stores(Path(sys.argv[1])) as urls:
        print(json.dumps([urls.database_url, urls.redis_url, urls.keeper_pid]), flush=True)
        sys.stdin.read()
except StoresError as error:
    print(json.dumps({"error": str(error)}), flush=True)
"""


class Owner:
    """Another process that owns stores."""

    def __init__(self, state: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", OWNER, str(state)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )

    def urls(self) -> StoreUrls:
        told = self._told()
        assert isinstance(told, list), told
        return StoreUrls(*told)

    def error(self) -> str:
        told = self._told()
        assert isinstance(told, dict), told
        return str(told["error"])

    def kill(self) -> None:
        self.process.kill()
        self._end()

    def stop(self) -> None:
        self._end()
        assert self.process.returncode == 0

    def _told(self) -> object:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def _end(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(30)


@pytest.fixture
def folder() -> Iterator[Path]:
    with short_folder() as made:
        yield made
        assert not processes_of(made), "the test left processes behind"


def processes_of(folder: Path) -> dict[int, str]:
    """Living servers and keepers of the state folders below a folder."""
    found = {}
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            command = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode()
            place = str((entry / "cwd").readlink())
            ours = "postgres" in command or "-server" in command or "dev.keeper" in command
            if ours and (str(folder) in command or place.startswith(str(folder))):
                found[int(entry.name)] = command
    return found


def socket_folder(urls: StoreUrls) -> Path:
    return Path(urls.redis_url.removeprefix("unix://")).parent


async def nothing_left(folder: Path, urls: StoreUrls) -> None:
    await eventually(lambda: not processes_of(folder), within=20, what="all processes have ended")
    assert not socket_folder(urls).exists()


async def write(urls: StoreUrls, number: int) -> None:
    connection = await asyncpg.connect(urls.database_url)
    await connection.execute("CREATE TABLE IF NOT EXISTS kept (x int)")
    await connection.execute("INSERT INTO kept VALUES ($1)", number)
    await connection.close()
    with redis.Redis.from_url(urls.redis_url) as client:
        client.xadd("kept", {"x": number})


async def kept(urls: StoreUrls) -> tuple[list[int], list[int]]:
    connection = await asyncpg.connect(urls.database_url)
    rows = [row["x"] for row in await connection.fetch("SELECT x FROM kept ORDER BY x")]
    await connection.close()
    with redis.Redis.from_url(urls.redis_url) as client:
        return rows, [int(fields[b"x"]) for _, fields in client.xrange("kept")]


async def test_data_stays_over_a_restart_and_nothing_runs_in_between(folder: Path) -> None:
    with stores(folder / "a") as urls:
        await write(urls, 1)
    await nothing_left(folder, urls)
    with stores(folder / "a") as again:
        assert await kept(again) == ([1], [1])
    assert again.database_url == urls.database_url
    assert "database system is shut down" in (folder / "a" / "postgres.log").read_text()


async def test_no_tcp_port_is_opened(folder: Path) -> None:
    with stores(folder / "a"):
        for pid in processes_of(folder):
            inodes = {link.readlink().name for link in Path(f"/proc/{pid}/fd").iterdir() if link.is_symlink()}
            listening = [row.split() for row in Path("/proc/net/tcp").read_text().splitlines()[1:]]
            assert not [row for row in listening if f"socket:[{row[9]}]" in inodes]


async def test_two_run_side_by_side(folder: Path) -> None:
    with stores(folder / "a") as one, stores(folder / "b") as two:
        await write(one, 1)
        await write(two, 2)
        assert await kept(one) == ([1], [1])
        assert await kept(two) == ([2], [2])


async def test_a_state_folder_in_use_is_refused_and_its_owner_named(folder: Path) -> None:
    with stores(folder / "a") as urls:
        with pytest.raises(StoresError, match=rf"in use \(process {urls.keeper_pid}\): stop the other one"):
            Stores(folder / "a").start()
        await write(urls, 1)


async def test_a_deep_state_folder_is_no_problem_for_sockets(folder: Path) -> None:
    with stores(folder / ("x" * 80) / ("y" * 80)) as urls:
        await write(urls, 1)


@pytest.mark.skipif("XDG_RUNTIME_DIR" in os.environ, reason="the sockets are in XDG_RUNTIME_DIR here")
async def test_a_socket_folder_of_somebody_else_is_not_used(folder: Path) -> None:
    with stores(folder / "a") as urls:
        place = socket_folder(urls)
    place.symlink_to(folder)
    try:
        with pytest.raises(StoresError, match="not a folder of ours"):
            Stores(folder / "a").start()
    finally:
        place.unlink()


async def test_a_killed_parent_leaves_nothing_and_postgres_shuts_down_cleanly(folder: Path) -> None:
    owner = Owner(folder / "a")
    urls = owner.urls()
    await write(urls, 1)
    owner.kill()
    await nothing_left(folder, urls)
    assert "database system is shut down" in (folder / "a" / "postgres.log").read_text()
    with stores(folder / "a") as again:
        assert await kept(again) == ([1], [1])


async def test_a_parent_killed_during_the_start_leaves_nothing(folder: Path) -> None:
    owner = Owner(folder / "a")
    await eventually(lambda: processes_of(folder), within=10, what="the keeper has started")
    owner.kill()
    await eventually(lambda: not processes_of(folder), within=20, what="all processes have ended")
    with stores(folder / "a") as urls:
        await write(urls, 1)


async def test_after_a_killed_keeper_the_next_start_has_all_data(folder: Path) -> None:
    owner = Owner(folder / "a")
    urls = owner.urls()
    await write(urls, 1)
    assert urls.keeper_pid
    os.kill(urls.keeper_pid, signal.SIGKILL)
    with stores(folder / "a") as again:
        assert await kept(again) == ([1], [1])
    owner.stop()


async def test_after_kill_9_of_everything_the_next_start_has_all_data(folder: Path) -> None:
    owner = Owner(folder / "a")
    urls = owner.urls()
    await write(urls, 1)
    for pid in [owner.process.pid, *processes_of(folder)]:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    owner.kill()
    with stores(folder / "a") as again:
        assert await kept(again) == ([1], [1])
    await nothing_left(folder, again)


async def test_a_server_that_outlived_its_keeper_is_stopped_first(folder: Path) -> None:
    owner = Owner(folder / "a")
    urls = owner.urls()
    await write(urls, 1)
    stopped = [pid for pid, command in processes_of(folder).items() if "dev.keeper" not in command]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)  # so that the parent-death signal has no effect
    assert urls.keeper_pid
    os.kill(urls.keeper_pid, signal.SIGKILL)
    with stores(folder / "a") as again:
        assert await kept(again) == ([1], [1])
        assert not set(stopped) & set(processes_of(folder))
    owner.stop()


async def test_a_stale_pid_file_that_names_a_living_stranger_harms_nobody(folder: Path) -> None:
    with stores(folder / "a") as urls:
        await write(urls, 1)
    data = folder / "a" / f"pg{find_postgres().major}"
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, cwd=data) as stranger:
        (data / "postmaster.pid").write_text(f"{stranger.pid}\n{data}\n")
        (folder / "a" / "redis" / "pid").write_text(str(stranger.pid))
        with stores(folder / "a") as again:
            assert await kept(again) == ([1], [1])
        assert stranger.poll() is None
        stranger.kill()


async def test_a_half_made_data_folder_is_made_anew(folder: Path) -> None:
    draft = folder / "a" / f".pg{find_postgres().major}.new"
    draft.mkdir(parents=True)
    (draft / "PG_VERSION").write_text("half")
    with stores(folder / "a") as urls:
        await write(urls, 1)
    assert not draft.exists()


async def test_the_end_of_a_server_ends_the_keeper_with_a_reason(folder: Path) -> None:
    owned = Stores(folder / "a")
    urls = owned.start()
    with redis.Redis.from_url(urls.redis_url) as client:
        os.kill(client.info()["process_id"], signal.SIGKILL)
    await eventually(lambda: not owned.running(), within=10, what="the keeper ends")
    owned.stop()
    await nothing_left(folder, urls)
    assert "ended with -9" in (folder / "a" / "keeper.log").read_text()


async def test_given_stores_are_used_and_nothing_is_started(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/db")
    monkeypatch.setenv("REDIS_URL", "redis://elsewhere")
    with stores(folder / "a") as urls:
        assert urls == StoreUrls("postgresql://elsewhere/db", "redis://elsewhere", None)
    assert not (folder / "a").exists()


async def test_one_given_store_is_used_beside_an_embedded_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DATABASE_URL", "postgresql://elsewhere/db")
    with stores(folder / "a") as urls:
        assert urls.database_url == "postgresql://elsewhere/db"
        with redis.Redis.from_url(urls.redis_url) as client:
            assert client.ping()
        assert not [command for command in processes_of(folder).values() if "bin/postgres" in command]


async def test_a_state_folder_of_another_major_version_is_refused(folder: Path) -> None:
    (folder / "a" / "pg9").mkdir(parents=True)
    (folder / "a" / "pg9" / "PG_VERSION").write_text("9\n")
    with pytest.raises(StoresError, match=r"is of Postgres 9, .*pg_dumpall.* restore .*AGENTRUN_POSTGRES_BIN") as refused:
        Stores(folder / "a").start()
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("variable", [binaries.POSTGRES_VARIABLE, binaries.REDIS_VARIABLE])
async def test_chosen_programs_that_are_not_there_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    monkeypatch.setenv(variable, "/nowhere")
    with pytest.raises(StoresError, match=f"^{variable}=/nowhere .*: name "):
        Stores(folder / "a").start()
    assert not processes_of(folder)


def test_no_programs_at_all_names_the_ways_out(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in (binaries.POSTGRES_VARIABLE, binaries.REDIS_VARIABLE):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(binaries, "_package", lambda name: None)
    monkeypatch.setattr(Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(ProgramMissingError, match=r"embedded.*PATH.*DATABASE_URL"):
        binaries.find_postgres()
    with pytest.raises(ProgramMissingError, match=r"embedded.*PATH.*REDIS_URL"):
        binaries.find_redis()


async def test_a_failed_start_says_why_in_one_line(folder: Path) -> None:
    (folder / "a").mkdir()
    (folder / "a" / "redis").write_text("a file where the folder should be")
    with pytest.raises(StoresError) as failed:
        Stores(folder / "a").start()
    assert "redis" in str(failed.value) and "\n" not in str(failed.value)
    assert not processes_of(folder)


async def test_a_broken_setting_is_reported_with_the_servers_own_words(folder: Path) -> None:
    with pytest.raises(StoresError, match="max_connections"):
        Stores(folder / "a", StoreSettings(postgres={"max_connections": "many"})).start()


@as_root
async def test_root_keeps_its_data_where_postgres_can_pass_and_changes_no_modes(folder: Path) -> None:
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    try:
        with stores(closed / "a") as urls:
            await write(urls, 1)
        with stores(closed / "a") as again:
            assert await kept(again) == ([1], [1])
        link = closed / "a" / f"pg{find_postgres().major}"
        assert link.is_symlink() and link.resolve().parent.parent == Path("/var/tmp")
        assert closed.stat().st_mode & 0o777 == 0o700
    finally:
        shutil.rmtree((closed / "a" / f"pg{find_postgres().major}").resolve().parent)


@as_root
@pytest.mark.skipif(os.environ.get(VARIABLE) == "system", reason="system programs are always within reach")
async def test_root_copies_programs_that_postgres_cannot_reach(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = find_postgres().folder.parent.parent
    closed = folder / "closed"
    closed.mkdir(mode=0o700)
    installed = find_postgres().folder.parent.name
    shutil.copytree(package / installed, closed / package.name / installed, symlinks=True)
    shutil.copytree(package.with_name(package.name + ".libs"), closed / f"{package.name}.libs")
    monkeypatch.setenv(binaries.POSTGRES_VARIABLE, str(closed / package.name / installed / "bin"))
    with stores(folder / "a") as urls:
        await write(urls, 1)
        copy = binaries.within_reach(find_postgres(), binaries.unprivileged_account()).folder
    assert copy.is_relative_to("/var/tmp")
    shutil.rmtree(copy.parents[2])
    assert closed.stat().st_mode & 0o777 == 0o700


async def test_the_sockets_are_closed_to_others(folder: Path) -> None:
    with stores(folder / "a") as urls:
        place = socket_folder(urls)
        assert place.stat().st_mode & 0o777 == 0o700
        assert all(entry.is_socket() or entry.name.endswith(".lock") for entry in place.iterdir())
        with socket.socket(socket.AF_UNIX) as client:
            client.connect(str(place / "redis.sock"))
