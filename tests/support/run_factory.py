"""Submissions and attempts for tests of the store, with as little to say as possible."""

import json
from typing import Any
from uuid import UUID

from agentrun.domain.events import Event, Kind, encode_data
from agentrun.domain.idempotency import body_hash, canonical, key
from agentrun.store import runs, transitions
from agentrun.store.ids import new_id
from agentrun.store.pool import Executor
from agentrun.store.transitions import Claim, Claimed, LedgerRow, Submission, Submitted

AGENT = "test/agent"
USER = "ann"


def submission(text: str = "hello", *, session: str = "s1", client_key: str | None = None, user: str = USER) -> Submission:
    """A message for a session; without a client key it is like no other."""
    body = canonical({"input": text})
    client_id = client_key or str(new_id())
    return Submission(
        run_id=new_id(),
        session_id=new_id(),
        input_id=new_id(),
        agent=AGENT,
        user_id=user,
        external_id=session,
        session_given=session,
        idempotency_key=key(agent=AGENT, user=user, session_given=session, client_key=client_id, body=body),
        client_key=client_key,
        body_hash=body_hash(body),
        body=body.decode(),
        content=json.dumps(text),
    )


async def submitted(conn: Executor, text: str = "hello", *, session: str = "s1") -> Submitted:
    """A new run."""
    return (await transitions.submit(conn, [submission(text, session=session)]))[0]


async def claimed(conn: Executor, run_id: UUID, *, owner: str = "w-1/n", lease: float = 30) -> Claimed:
    """The run, claimed at the epoch where it stands."""
    seen = (await runs.look(conn, [run_id]))[run_id].epoch
    return (await transitions.claim(conn, [Claim(run_id, seen, owner)], lease_seconds=lease))[0]


def event(seq: int, kind: Kind = Kind.TEXT_DELTA, *, epoch: int = 1, **data: Any) -> Event:
    """An event; a text delta unless said otherwise."""
    if kind is Kind.TEXT_DELTA and not data:
        data = {"item": 0, "part": 0, "text": f"t{seq} "}
    return Event(seq, epoch, kind, encode_data(data))


def ledger_row(call: int = 0, *, cost: str | None = "0.000015", unmeasured: bool = False) -> LedgerRow:
    """A priced call."""
    from decimal import Decimal

    price = None if cost is None else Decimal(cost)
    return LedgerRow(call, "test:model", 100, 64, 0, 10, 4, 0, 0, price, "test" if cost else None, unmeasured)
