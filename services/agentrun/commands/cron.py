"""`agentrun cron`: what CronTasks do, when they fire next, and runs that somebody asks for."""

import secrets
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any
from urllib.parse import quote

import typer

from agentrun.commands.output import PAGE, Json, ask_gateway, pages, print_json, print_table, when
from agentrun.domain import cron
from agentrun.domain.errors import ConfigurationError, ManifestError
from agentrun.domain.slots import minute

if TYPE_CHECKING:
    from agentrun.manifests import CronTask

app = typer.Typer(
    help="CronTasks: their slots and runs. Asks the gateway at AGENTRUN_URL with AGENTRUN_API_KEY, a key of scope admin.",
    no_args_is_help=True,
)

Name = Annotated[str, typer.Argument(metavar="NAME", help="The CronTask's name.")]


@app.command("list")
def list_tasks(as_json: Json = False) -> None:
    """CronTasks by their names: what came of the last slot, and when the next one is."""
    with ask_gateway() as gateway:
        found = list(pages(gateway, "/v1/cron-tasks", "cron_tasks"))
    if as_json:
        print_json(found)
        return
    rows = [
        (
            one["name"],
            one["schedule"],
            one["time_zone"],
            "suspended" if one["suspended"] else "cannot be followed" if one["problem"] else "",
            when(one["last_slot"]),
            one["last_outcome"] or "",
            when(next(iter(one["next"]), None)),
            str(len(one["active"])),
        )
        for one in found
    ]
    print_table(("NAME", "SCHEDULE", "TIMEZONE", "STATE", "LAST", "OUTCOME", "NEXT", "ACTIVE"), rows)


@app.command()
def history(
    name: Name,
    limit: Annotated[int, typer.Option(min=1, max=10_000, help="How many slots, the newest.")] = 20,
    as_json: Json = False,
) -> None:
    """What became of a CronTask's slots, newest first."""
    with ask_gateway() as gateway:
        found: list[dict[str, Any]] = []
        before = None
        while len(found) < limit:
            query = {"before": before, "limit": min(PAGE, limit - len(found))}
            page = gateway.ask("GET", f"{_path(name)}/slots", query=query)
            found += page["slots"]
            before = page["next"]
            if before is None:
                break
    if as_json:
        print_json(found)
        return
    rows = [
        (when(one["slot"]), one["outcome"], one["run_id"] or "", one.get("run_status") or "", one["detail"] or "")
        for one in found
    ]
    print_table(("SLOT", "OUTCOME", "RUN", "STATUS", "DETAIL"), rows)


@app.command()
def trigger(
    name: Name,
    key: Annotated[str | None, typer.Option("--id", help="Your id of this trigger: used again, it finds the same run.")] = None,
    as_json: Json = False,
) -> None:
    """Start a run of a CronTask now, whatever its schedule says."""
    with ask_gateway() as gateway:
        headers = {"Idempotency-Key": key or secrets.token_hex(16)}  # a request that is sent twice starts one run
        done = gateway.ask("POST", f"{_path(name)}/trigger", headers=headers)
    if as_json:
        print_json([done])
    else:
        print(f"{'the run was there already' if done['replayed'] else 'started'}: {done['run_id']}")


@app.command()
def backfill(
    name: Name,
    since: Annotated[str, typer.Option("--from", metavar="TIME", help="The first moment: 2026-11-29, or 2026-11-29T10:06Z.")],
    until: Annotated[str | None, typer.Option("--to", metavar="TIME", help="The last moment; without it now.")] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Change nothing, only show what would be done.")] = False,
    as_json: Json = False,
) -> None:
    """Start a run for each past slot of a CronTask that has none. May be repeated: no slot gets a second run."""
    start: str | None = _moment("--from", since).isoformat()
    end = _moment("--to", until).isoformat() if until else None
    with ask_gateway() as gateway:
        started = there = 0
        while start is not None:
            query = {"from": start, "to": end, "dry_run": dry_run}
            page = gateway.ask("POST", f"{_path(name)}/backfill", query=query)
            new = [one for one in page["slots"] if one["started"]]
            started, there = started + len(new), there + len(page["slots"]) - len(new)
            if as_json:
                print_json(page["slots"])
            else:
                for one in new:
                    print(f"{when(one['slot'])}  {one['run_id'] or 'would be run'}")
            start = page["next"]
    if not as_json:
        print(f"{started} slots {'would be run' if dry_run else 'started'}, {there} had a run already")


@app.command("next")
def next_slots(
    name: Annotated[str | None, typer.Argument(metavar="[NAME]", help="The CronTask's name; with -f, one of the file's.")] = None,
    file: Annotated[Path | None, typer.Option("--file", "-f", help="A manifest; no gateway is asked.")] = None,
    count: Annotated[int, typer.Option(min=1, max=1000, help="How many slots.")] = 5,
    since: Annotated[str | None, typer.Option("--from", metavar="TIME", help="Slots after this moment; without it now.")] = None,
    as_json: Json = False,
) -> None:
    """When a CronTask fires next, by its schedule alone: whether it is suspended is not asked."""
    begin = _moment("--from", since) if since else datetime.now(UTC)
    for shown in _of_file(file, name) if file is not None else [_of_gateway(name)]:
        schedule = cron.parse(shown["schedule"], shown["zone"], seed=cron.seed(shown["namespace"], shown["name"]))
        found = list(islice(schedule.after(begin), count))
        local = {slot: slot.astimezone(schedule.zone) for slot in found}
        if as_json:
            print_json({"name": shown["name"], "slot": slot.isoformat(), "local": local[slot].isoformat()} for slot in found)
        else:
            rows = [(shown["name"], minute(slot), f"{local[slot]:%a %Y-%m-%d %H:%M %Z}") for slot in found]
            print_table(("NAME", "SLOT", shown["zone"]), rows)


def _of_file(file: Path, name: str | None) -> list[dict[str, str]]:
    from agentrun.manifests import load_all

    found = [task for task in load_all(file).cron_tasks if name in (None, task.metadata.name)]
    if not found:
        raise ManifestError(f"{file}: holds no CronTask{f' named {name}' if name else ''}; name another file")
    for task in found:
        _check(task, file)
    return [
        {
            "name": task.metadata.name,
            "namespace": task.metadata.namespace,
            "schedule": task.spec.schedule,
            "zone": task.spec.time_zone,
        }
        for task in found
    ]


def _check(task: "CronTask", file: Path) -> None:
    if problem := cron.schedule_problem(task.spec.schedule):
        raise ManifestError(f"{file}: spec.schedule: {problem}")
    if problem := cron.zone_problem(task.spec.time_zone):
        raise ManifestError(f"{file}: spec.timeZone: {problem}")


def _of_gateway(name: str | None) -> dict[str, str]:
    if name is None:
        raise ConfigurationError("name a CronTask, or a file with -f")
    with ask_gateway() as gateway:
        found = gateway.ask("GET", _path(name))
    if found["problem"]:
        raise ConfigurationError(f"{name} cannot be followed: {found['problem']}")
    return {"name": name, "namespace": found["namespace"], "schedule": found["schedule"], "zone": found["time_zone"]}


def _path(name: str) -> str:
    return f"/v1/cron-tasks/{quote(name, safe='')}"


def _moment(option: str, text: str) -> datetime:
    """A moment as people write it; without an offset it is UTC."""
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{option}: {text!r} is no time; write 2026-11-29T10:06Z or 2026-11-29T11:06+01:00") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
