"""`agentrun effects`: calls of which nobody knows what came, and saying what came of them."""

import json
from enum import StrEnum
from typing import Annotated, Any
from urllib.parse import quote

import typer

from agentrun.commands.output import Json, ask_gateway, pages, print_json, print_table, when
from agentrun.domain.errors import ConfigurationError

app = typer.Typer(
    help="Effects whose outcome is unknown. Asks the gateway at AGENTRUN_URL with AGENTRUN_API_KEY; settling needs a key of scope admin.",
    no_args_is_help=True,
)


class Outcome(StrEnum):
    """What came of a call."""

    DONE = "done"
    FAILED = "failed"


@app.command("list")
def list_effects(
    user: Annotated[str | None, typer.Option(help="Only this user's.")] = None,
    as_json: Json = False,
) -> None:
    """Calls of ended runs of which nobody knows what came, newest runs first."""
    with ask_gateway() as gateway:
        found = list(pages(gateway, "/v1/effects", "effects", user=user))
    if as_json:
        print_json(found)
        return
    rows = [
        (one["run_id"], one["name"], one["key"], one["state"], str(one["tries"]), when(one["created_at"]), one["user"])
        for one in found
    ]
    print_table(("RUN", "EFFECT", "KEY", "STATE", "TRIES", "SINCE", "USER"), rows)


@app.command()
def settle(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id, as `agentrun effects list` shows it.")],
    name: Annotated[str, typer.Argument(metavar="EFFECT", help="The effect's name.")],
    key: Annotated[str, typer.Argument(metavar="KEY", help="The effect's key.")],
    outcome: Annotated[Outcome, typer.Argument(help="done: it has happened. failed: nothing has happened, it may be made.")],
    response: Annotated[
        str | None, typer.Option(metavar="JSON", help="With done: what later attempts get instead of making the call.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Say what came of a call, after a look at the other side. May be repeated; what is on record as settled stays."""
    body: dict[str, Any] = {"name": name, "key": key, "state": outcome.value}
    if response is not None:
        body["response"] = _json(response)
    with ask_gateway() as gateway:
        done = gateway.ask("POST", f"/v1/runs/{quote(run, safe='')}/effects/settle", body=body)
    if as_json:
        print_json([done])
    else:
        print(f"{done['name']} {done['key']}  {done['state']}")


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise ConfigurationError(f"--response: no JSON ({error}); write '\"refund 4711\"' for a text") from None
