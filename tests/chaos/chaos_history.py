"""What was seen of a chaos run: by its clients, by the world, and in the tables afterwards. The judge knows nothing else."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import asyncpg
from chaos_provider import ModelCall


@dataclass
class Accepted:
    """A 202: which key was answered with which run."""

    key: str
    run_id: str
    replayed: bool


@dataclass
class Reader:
    """What one client saw of a run: the numbers in the order in which they came, the text by the reducer, and the end."""

    run_id: str
    seqs: list[int] = field(default_factory=list)
    text: str = ""
    end: str | None = None
    connections: int = 0
    restarts: int = 0
    refusals: int = 0


@dataclass
class Seen:
    """By the clients. `wrong` is every answer that no client should get."""

    sent: dict[str, str] = field(default_factory=dict)  # key -> text
    accepted: list[Accepted] = field(default_factory=list)
    refused: set[str] = field(default_factory=set)  # keys that were never sent again after a 429, nor had been before it
    readers: list[Reader] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    counts: Counter[str] = field(default_factory=Counter)


Row = dict[str, Any]


@dataclass
class Tables:
    """Postgres' rows, ids as text."""

    runs: list[Row]
    attempts: list[Row]
    messages: list[Row]
    inputs: list[Row]
    ledger: list[Row]
    effects: list[Row]
    dead_letters: list[Row]
    counters: list[Row]


_QUERIES = {
    "runs": "SELECT id::text, session_id::text, session_position, status, epoch, client_key, result::text, error::text, "
    "superseded_by::text FROM runs ORDER BY id",
    "attempts": "SELECT run_id::text, epoch, owner, outcome FROM attempts ORDER BY run_id, epoch",
    "messages": "SELECT run_id::text, seq, epoch, kind, data::text FROM messages ORDER BY run_id, seq",
    "inputs": "SELECT run_id::text, held_by::text, session_id::text, position, content #>> '{}' AS text, fate, fate_run::text "
    "FROM inputs ORDER BY session_id, position",
    "ledger": "SELECT run_id::text, epoch, call, input_tokens, cached_tokens, output_tokens, reasoning_tokens, cost_usd, unmeasured "
    "FROM ledger ORDER BY run_id, epoch, call",
    "effects": "SELECT run_id::text, name, key, state FROM effects",
    "dead_letters": "SELECT run_id::text, reason FROM dead_letters",
    "counters": "SELECT scope, sum(reserved) AS reserved, sum(spent) AS spent FROM budget_counters GROUP BY scope ORDER BY scope",
}


async def read_tables(pool: asyncpg.Pool) -> Tables:
    """All rows, as they were at one moment."""
    async with pool.acquire() as connection, connection.transaction(isolation="repeatable_read", readonly=True):
        return Tables(**{name: [dict(row) for row in await connection.fetch(sql)] for name, sql in _QUERIES.items()})


@dataclass
class History:
    """Everything. `killed`: names of processes that got SIGKILL, or ended as they should not; `left`: entries in Redis at the end."""

    seen: Seen
    tables: Tables
    calls: list[ModelCall]
    acted: Mapping[str, int]
    killed: frozenset[str] = frozenset()
    left: int = 0
    max_lost_attempts: int = 3
