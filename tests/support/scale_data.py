"""Tables as they are after a long time, made in bulk: for tests of plans and of retention. No tests in here."""

import asyncpg

AGENT = "test/agent"
RUNS_PER_SESSION = 4
EVENTS_PER_RUN = 10
BIG = ("sessions", "runs", "attempts", "messages", "inputs", "ledger", "effects", "dead_letters")
"""The tables that grow with use: none of them may be read as a whole."""

_UUID = "('00000000-0000-7000-8000-' || lpad(to_hex({}), 12, '0'))::uuid"
_RUN, _SESSION = _UUID.format("n"), _UUID.format(f"n / {RUNS_PER_SESSION}")

# Of ten thousand runs a hundred are pending, the newest ones; the older they are, the more is archived.
_FILL = f"""
INSERT INTO sessions (id, agent, user_id, external_id, next_position, created_at)
SELECT {_UUID.format("n")}, '{AGENT}', 'user-' || n % 1000, 'session-' || n, {RUNS_PER_SESSION}, now() - interval '90 days'
FROM generate_series(0, $1::bigint / {RUNS_PER_SESSION}) AS n;

INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, status, epoch, idempotency_key, client_key, body_hash,
                  input, result, created_at, started_at, finished_at, archived_at, redrive_of)
SELECT {_RUN}, '{AGENT}', 'user-' || n / {RUNS_PER_SESSION} % 1000, {_SESSION}, 'session-' || n / {RUNS_PER_SESSION},
       n % {RUNS_PER_SESSION},
       CASE WHEN live THEN 'pending' WHEN n % 50 = 0 THEN 'failed' ELSE 'succeeded' END, CASE WHEN live THEN 0 ELSE 1 END,
       'key-' || n, 'client-' || n, 'hash', '{{"input": "hello"}}', '{{"output": "hello", "messages": []}}', at,
       CASE WHEN NOT live THEN at END, CASE WHEN NOT live THEN at END, CASE WHEN at < now() - interval '7 days' THEN at END,
       CASE WHEN n % 5000 = 1 THEN {_UUID.format("n - 1")} END
FROM (SELECT n, n > $1 * 0.99 AS live, now() - interval '60 days' * (1 - n::float / $1) AS at
      FROM generate_series(0, $1::bigint - 1) AS n) x;

INSERT INTO inputs (id, run_id, held_by, session_id, position, content, fate, fate_run)
SELECT {_RUN}, {_RUN}, {_RUN}, {_SESSION}, n % {RUNS_PER_SESSION}, '"hello"', 'answered_in', {_RUN}
FROM generate_series(0, $1::bigint - 1) AS n;

INSERT INTO attempts (run_id, epoch, owner, outcome, lease_expires_at, seq_reserved, ended_at)
SELECT {_RUN}, 1, 'w/' || n, 'finished', now(), 9, now() FROM generate_series(0, ($1 * 0.99)::bigint) AS n;

INSERT INTO messages (run_id, seq, epoch, kind, data)
SELECT {_UUID.format(f"(($1 * 0.98)::bigint - n / {EVENTS_PER_RUN})")}, n % {EVENTS_PER_RUN}, 1,
       CASE n % {EVENTS_PER_RUN} WHEN 0 THEN 'item_added' WHEN 8 THEN 'text_done' WHEN 9 THEN 'completed' ELSE 'text_delta' END,
       '{{"item": 0, "part": 0, "type": "message", "text": "hello"}}'
FROM generate_series(0, $1::bigint - 1) AS n;

INSERT INTO ledger (run_id, epoch, call, at, agent, user_id, session_id, model, input_tokens, cached_tokens, cache_write_tokens,
                    output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd)
SELECT {_RUN}, 1, 0, now() - interval '60 days' * (1 - n::float / $1), '{AGENT}', 'user-' || n % 1000, {_SESSION}, 'm',
       1, 0, 0, 1, 0, 0, 0, 0.1
FROM generate_series(0, ($1 * 0.99)::bigint) AS n;

INSERT INTO effects (chain_id, name, key, run_id, epoch, state)
SELECT {_RUN}, 'refund', 'o-' || n, {_RUN}, 1, CASE WHEN n % 10000 = 0 THEN 'unknown' ELSE 'done' END
FROM generate_series(0, ($1 * 0.98)::bigint) AS n;

INSERT INTO dead_letters (run_id, payload, reason, attempts, discarded_at)
SELECT {_RUN}, '{{"input": "hello"}}', 'lost_too_often', 3, CASE WHEN n % 5000 <> 0 THEN now() END
FROM generate_series(0, ($1 * 0.98)::bigint, 50) AS n;
"""


def run_id(number: int) -> str:
    """The id of a run by its number, the oldest 0."""
    return f"00000000-0000-7000-8000-{number:012x}"  # events have the runs from 0.88 to 0.98 of all


async def fill(conn: asyncpg.Connection, rows: int) -> None:
    """So many runs and events, and what belongs to them; past the triggers, which would have it one step at a time."""
    await conn.execute("SET session_replication_role = replica; SET synchronous_commit = off")
    for statement in _FILL.split(";\n"):
        if statement.strip():
            await conn.execute(statement.replace("$1", str(rows)))
    await conn.execute("SET session_replication_role = DEFAULT")
    await conn.execute("ANALYZE")


async def add_finished(conn: asyncpg.Connection, *, first: int, runs: int, events: int, age: str) -> None:
    """Finished runs, each of one message in so many pieces, that ended so long ago."""
    await conn.execute("SET session_replication_role = replica")
    await conn.execute(
        f"""INSERT INTO sessions (id, agent, user_id, external_id)
            SELECT {_RUN}, '{AGENT}', 'old', 'old-' || n FROM generate_series({first}, {first + runs - 1}) AS n"""
    )
    await conn.execute(
        f"""INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, status, epoch, idempotency_key, body_hash,
                              input, result, finished_at)
            SELECT {_RUN}, '{AGENT}', 'old', {_RUN}, '', 0, 'succeeded', 1, 'old-' || n, '', '{{}}', '{{"output": "x"}}',
                   now() - interval '{age}'
            FROM generate_series({first}, {first + runs - 1}) AS n"""
    )
    await conn.execute(
        f"""INSERT INTO messages (run_id, seq, epoch, kind, data)
            SELECT {_RUN}, s, 1, CASE s WHEN {events} THEN 'text_done' WHEN {events + 1} THEN 'completed' ELSE 'text_delta' END,
                   '{{"item": 0, "part": 0, "text": "a piece of the answer, of some length "}}'
            FROM generate_series({first}, {first + runs - 1}) AS n, generate_series(0, {events + 1}) AS s"""
    )
    await conn.execute("SET session_replication_role = DEFAULT")
