"""GET /v1/usage: what was spent, as JSON or CSV."""

from datetime import UTC, date, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Query
from pydantic import BaseModel, BeforeValidator, Field
from starlette.responses import Response

from agentrun.costs import reports
from agentrun.gateway.answering import answering
from agentrun.gateway.context import Gateway
from agentrun.gateway.problems import INVALID_PARAMETER, Problem
from agentrun.gateway.routes.parameters import User, Who
from agentrun.store import usage
from agentrun.store.usage import GroupBy, TooManyGroups

MOST_GROUPS = 20_000
DAYS = 30
"""A report covers so many days if no beginning is given."""

_as_day = BeforeValidator(date.fromisoformat)  # pydantic alone would take a number for seconds since 1970
First = Annotated[date | None, _as_day, Query(alias="from", description="The first day, in UTC; without it 30 days back.")]
Last = Annotated[date | None, _as_day, Query(alias="to", description="The last day, itself included, in UTC; without it today.")]
Grouping = Annotated[
    str, Query(alias="group_by", description="One or more of day, model, session, user, task, agent, with commas between them.")
]
Format = Annotated[Literal["json", "csv"], Query(alias="format", description="csv: a table for spreadsheets, without a total.")]


class Figures(BaseModel):
    """Sums over calls."""

    calls: int
    input_tokens: int
    cached_tokens: int
    cache_write_tokens: int
    output_tokens: int
    reasoning_tokens: int
    audio_input_tokens: int
    audio_output_tokens: int
    cost_usd: str | None = Field(description="Exact, in USD, of the calls that have a price; null if none has.")
    unpriced: int = Field(description="Calls whose price is not known.")
    unmeasured: int = Field(description="Calls whose counts are estimates.")
    lost_calls: int = Field(description="Of these calls, those of attempts whose worker was lost.")
    lost_usd: str = Field(description="What they cost.")


class UsageGroup(Figures):
    """One group: the members that it is grouped by, as text, and its sums."""

    day: str | None = None
    model: str | None = None
    session: str | None = Field(default=None, description="The session's name; empty if the session is gone.")
    session_id: str | None = None
    user: str | None = None
    task: str | None = Field(default=None, description="The CronTask's name; empty for runs that none started.")
    agent: str | None = None


class UsageReport(BaseModel):
    """What was spent."""

    first: date = Field(serialization_alias="from")
    last: date = Field(serialization_alias="to")
    group_by: list[GroupBy]
    groups: list[UsageGroup]
    total: Figures


def router(gateway: Gateway) -> APIRouter:
    """The address."""
    routes = APIRouter(tags=["usage"])

    @routes.get(
        "/v1/usage",
        summary="What was spent: the caller's own, with the scope admin everybody's",
        response_model=UsageReport,
        response_model_exclude_unset=True,
        responses={200: {"content": {"text/csv": {"schema": {"type": "string"}}}}},
    )
    async def get_usage(
        caller: Who, since: First = None, until: Last = None, group_by: Grouping = "day", user: User = None, form: Format = "json"
    ) -> Any:
        by = _grouping(group_by)
        last = until or datetime.now(UTC).date()
        first = since or last - timedelta(days=DAYS - 1)
        if first > last:
            raise Problem(INVALID_PARAMETER, "`from` comes after `to`. Exchange them.")
        whose = caller.asking_for(user)
        try:
            async with answering():
                found = await usage.report(
                    gateway.pool, by, agent=gateway.agent, user=whose, since=first, until=last, most=MOST_GROUPS
                )
                names = await reports.names_of(gateway.pool, found, by)
        except TooManyGroups:
            raise Problem(
                INVALID_PARAMETER, f"More than {MOST_GROUPS} groups. Ask for fewer days, for one user, or group by less."
            ) from None
        if form == "csv":
            name = f"usage-{first}-{last}.csv"
            headers = {"Content-Disposition": f'attachment; filename="{name}"', "Cache-Control": "no-store"}
            return Response(reports.as_csv(found, by, names), media_type="text/csv; charset=utf-8", headers=headers)
        groups = [
            UsageGroup(**reports.labels(one.values, by, names), **reports.figures(one.sums))  # type: ignore[arg-type]
            for one in found.groups
        ]
        total = Figures(**reports.figures(found.total))  # type: ignore[arg-type]
        return UsageReport(first=first, last=last, group_by=by, groups=groups, total=total)

    return routes


def _grouping(text: str) -> list[GroupBy]:
    try:
        by = [GroupBy(name.strip()) for name in text.split(",")]
    except ValueError:
        raise Problem(
            INVALID_PARAMETER, f"`group_by` is one or more of {', '.join(GroupBy)}, with commas between them."
        ) from None
    if len(set(by)) < len(by):
        raise Problem(INVALID_PARAMETER, "`group_by` names something twice. Name it once.")
    return by
