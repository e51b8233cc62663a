"""`agentrun costs`: work on the ledger itself, where the database is: in a pod of the scheduler, or beside `agentrun dev`."""

import asyncio
from contextlib import suppress
from datetime import UTC, date, datetime, time
from typing import TYPE_CHECKING, Annotated

import typer

from agentrun import settings
from agentrun.costs.amounts import usd
from agentrun.domain.errors import ConfigurationError, ManifestError
from agentrun.settings import Settings

if TYPE_CHECKING:
    from agentrun.costs.pricing import Overrides
    from agentrun.costs.repricing import Repriced

app = typer.Typer(
    help="The ledger of model calls. Works on DATABASE_URL, with the prices of AGENTRUN_MANIFEST.", no_args_is_help=True
)


@app.callback()
def _group() -> None:
    """One command, and room for more."""


@app.command("reprice")
def reprice_calls(
    since: Annotated[str, typer.Option("--from", metavar="DAY", help="The first day (UTC), or a moment: 2026-11-01.")],
    until: Annotated[
        str | None, typer.Option("--to", metavar="DAY", help="The last day, itself included, or the moment before which; now.")
    ] = None,
) -> None:
    """Give calls a price that had none when they were made. Prices that are there stay; may be stopped and repeated."""
    current = settings.read("database_url")
    begin, end = _moment("--from", since, end=False), _moment("--to", until, end=True) if until else datetime.now(UTC)
    if end <= begin:
        raise ConfigurationError("--to comes before --from; exchange them")
    done = asyncio.run(_reprice(current, _overrides(current), begin, end))
    print(f"{done.calls} calls have a price now: {usd(done.cost_usd)} USD")
    for model, calls in sorted(done.left.items()):
        print(f"still without a price: {calls} calls of {model or '(no name)'}")


async def _reprice(current: Settings, overrides: "Overrides", since: datetime, until: datetime) -> "Repriced":
    from agentrun.costs.repricing import reprice  # the table of prices takes longer to load than all the rest
    from agentrun.store.pool import create_pool

    pool = await create_pool(current.database_url, 1, name="agentrun-costs")
    try:
        return await reprice(pool, overrides, since=since, until=until)
    finally:
        pool.terminate()


def _overrides(current: Settings) -> "Overrides":
    from agentrun.costs.rules import overrides_of
    from agentrun.manifests import load

    if current.manifest is None:
        return {}
    for one in (found := load(current.manifest)):
        if len(found) == 1 or one.metadata.name == current.name:
            return overrides_of(one.spec)
    raise ManifestError(f"{current.manifest}: holds no AgentRun named {current.name}; set AGENTRUN_NAME to one of its names")


def _moment(option: str, text: str, *, end: bool) -> datetime:
    """A day, or a moment; without an offset in UTC. A day as an end is its last moment."""
    with suppress(ValueError):
        return datetime.combine(date.fromisoformat(text), time.max if end else time.min, UTC)
    try:
        found = datetime.fromisoformat(text)
    except ValueError:
        raise ConfigurationError(f"{option}: {text!r} is no day; write 2026-11-01 or 2026-11-01T10:00Z") from None
    return found.replace(tzinfo=UTC) if found.tzinfo is None else found
