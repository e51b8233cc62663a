"""One look at a database or a Redis: may it be used? Opens a connection of its own and closes it again."""

from dataclasses import dataclass

import asyncpg

from agentrun.bus import connection
from agentrun.bus.connection import LoginRefused, MayEvict, TooOld
from agentrun.domain.errors import BusMisconfigured, BusUnavailable, ConfigurationError, StoreUnavailable
from agentrun.store import budgets, cron_tasks, dead_letters, ledger, migrations, pool
from agentrun.store.pool import Executor, connect, unavailable
from agentrun_operator.facts import NOTHING_SPENT, BudgetFact, QueueFact, SchemaFact, SpendingFact, StoreProblem
from agentrun_operator.hanging_up import close

ANSWER_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class DatabaseFact:
    """The schema, how many dead letters nobody has redriven and how many schedules there are; None where there is no table for them."""

    schema: SchemaFact
    dead_lettered: int | None = None
    schedules: int | None = None
    spending: SpendingFact = NOTHING_SPENT


DATABASE_UNREACHABLE = DatabaseFact(SchemaFact(migrations.LATEST, problem=StoreProblem.UNREACHABLE))
REDIS_UNREACHABLE = QueueFact(StoreProblem.UNREACHABLE)


async def ask_database(url: str) -> tuple[DatabaseFact, bool]:
    """The fact, and whether it is as good as it gets: then it is not asked again soon."""
    if not url.startswith(("postgresql://", "postgres://")):  # an empty one would lead to a server on this machine
        return _problem(StoreProblem.BAD_URL), False
    try:
        conn = await connect(url, name="agentrun-operator", command_timeout=ANSWER_SECONDS)
    except pool.CertificateRefused:
        return _problem(StoreProblem.UNTRUSTED), False
    except pool.NoTls:
        return _problem(StoreProblem.NO_TLS), False
    except pool.CertificateUnreadable:
        return _problem(StoreProblem.BAD_CERTIFICATE), False
    except StoreUnavailable as error:
        refused = isinstance(error.__cause__, asyncpg.InvalidAuthorizationSpecificationError | asyncpg.InvalidCatalogNameError)
        return _problem(StoreProblem.REFUSED if refused else StoreProblem.UNREACHABLE), False
    except ConfigurationError:
        return _problem(StoreProblem.BAD_URL), False
    except asyncpg.PostgresError:
        return _problem(StoreProblem.REFUSED), False
    try:
        state = await migrations.check(conn)
        if state.present == 0 and await _has_tables(conn):
            return _problem(StoreProblem.OTHER_APPLICATION), False
        dead_lettered = await dead_letters.count_open(conn) if state.present else None
        schedules = await cron_tasks.count_live(conn) if state.present else None
        spending = await _spending(conn, state.present)
    except StoreUnavailable:
        return DATABASE_UNREACHABLE, False
    except asyncpg.PostgresError:
        return _problem(StoreProblem.REFUSED), False
    finally:
        await close(conn)
    schema = SchemaFact(state.required, state.present, state.oldest_accepted, state.owner, has_schedules=bool(schedules))
    return DatabaseFact(schema, dead_lettered, schedules, spending), state.present >= state.required and state.owner is not None


async def _spending(conn: Executor, schema: int) -> SpendingFact:
    if not schema:
        return NOTHING_SPENT
    days = tuple(BudgetFact(day, usd) for day, usd in (await budgets.spent_lately(conn)).items())
    return SpendingFact(days, await ledger.unpriced_models(conn) if schema >= ledger.UNPRICED_SINCE else ())


async def _has_tables(conn: Executor) -> bool:
    """Whether somebody else works here: the migration would refuse."""
    with unavailable():
        return bool(
            await conn.fetchval(
                "SELECT EXISTS (SELECT FROM pg_class WHERE relnamespace = current_schema()::regnamespace AND relkind IN ('r', 'p'))"
            )
        )


def _problem(problem: StoreProblem) -> DatabaseFact:
    return DatabaseFact(SchemaFact(migrations.LATEST, problem=problem))


async def ask_redis(url: str) -> tuple[QueueFact, bool]:
    """The same for a Redis."""
    try:
        redis = await connection.connect(url, size=1)
    except connection.CertificateUnreadable:
        return QueueFact(StoreProblem.BAD_CERTIFICATE), False
    except ConfigurationError:
        return QueueFact(StoreProblem.BAD_URL), False
    try:
        await connection.check(redis)
    except MayEvict:
        return QueueFact(StoreProblem.EVICTS), False
    except TooOld:
        return QueueFact(StoreProblem.TOO_OLD), False
    except connection.CertificateRefused:
        return QueueFact(StoreProblem.UNTRUSTED), False
    except (LoginRefused, BusMisconfigured):
        return QueueFact(StoreProblem.REFUSED), False
    except BusUnavailable:
        return REDIS_UNREACHABLE, False
    finally:
        await redis.aclose()
    return QueueFact(), True
