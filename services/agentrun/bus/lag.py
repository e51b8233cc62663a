"""How much work there is, as Redis sees it: what the number of workers follows."""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from redis.asyncio import ConnectionPool, Redis
from redis.exceptions import NoScriptError, ResponseError

from agentrun.bus.connection import GroupMissing, ReadOnly, answering, new_connection, script, source, translate
from agentrun.bus.keys import GROUP, Keys
from agentrun.domain.errors import AgentrunError, BusUnavailable

COUNT_ALWAYS = 1_000
COUNT_AT_MOST = 10_000
PENDING_AT_MOST = 10_000
QUESTIONS_PER_TRIP = 250
"""How many AgentRuns are asked about in one round trip: their answers, and the time that Redis needs for them, stay small."""


@dataclass(frozen=True, slots=True)
class Demand:
    """Entries: not delivered yet; being worked on; delivered, and untouched for so long that a reaper will take them."""

    undelivered: int
    in_flight: int
    reclaimable: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.undelivered + self.in_flight + self.reclaimable


@dataclass(frozen=True, slots=True)
class Reading:
    """The demand of one AgentRun, and how many entries each consumer holds (those that hold any).

    `age_seconds` is the age of the group: one that was just made, as after a loss of all data, does not know yet who works. None: a
    former version of this code has made it, long ago.
    """

    demand: Demand
    held: Mapping[str, int] = field(default_factory=dict)
    age_seconds: float | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Question:
    """Whose demand is asked for, and after how many milliseconds an untouched entry counts as reclaimable."""

    keys: Keys
    idle_ms: int


async def sample(redis: Redis, keys: Keys, idle_ms: int) -> Demand | None:
    """The demand now, in one round trip, or None if Redis does not tell: unknown is not zero.

    A backlog up to 1,000 is exact. A missing stream or group is created, and is no demand.
    """
    try:
        async with answering(redis.connection_pool):
            return _reading(await script(redis, "sample")([keys.runs, keys.born], _arguments(idle_ms))).demand
    except BusUnavailable:
        return None


class ManySampler:
    """The demand of many AgentRuns of one Redis, over one connection of its own that opens when it is needed.

    A command is packed once and sent again at each tick. After an error the connection is closed, so that no answer reaches the
    wrong question.
    """

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._connection = new_connection(pool)
        self._source = source("sample")
        self._sha = hashlib.sha1(self._source.encode(), usedforsecurity=False).hexdigest()
        self._role = b"".join(self._connection.pack_command("ROLE"))
        self._packed: dict[Question, bytes] = {}

    async def sample(self, questions: Sequence[Question]) -> list[Reading | AgentrunError]:
        """An answer for each, in their order: a round trip for each 250. An error that concerns one AgentRun alone stands in its place.

        Raises BusUnavailable if Redis does not answer or refuses for now, ReadOnly (one of these) if it is a replica: a primary that was
        demoted keeps its connections and answers with old data. Raises BusMisconfigured if it refuses scripts.
        """
        answers: list[Reading | AgentrunError] = []
        try:
            for start in range(0, len(questions), QUESTIONS_PER_TRIP):
                async with answering(self._pool):
                    answers += await self._trip(questions[start : start + QUESTIONS_PER_TRIP])
        except BaseException:
            await self._connection.disconnect(nowait=True)
            raise
        return answers

    def forget(self, question: Question) -> None:
        """Drops what is kept for a question that will not be asked again."""
        self._packed.pop(question, None)

    async def aclose(self) -> None:
        """Closes the connection."""
        await self._connection.disconnect(nowait=True)

    async def _trip(self, questions: Sequence[Question]) -> list[Reading | AgentrunError]:
        await self._connection.connect()
        commands = [self._role, *map(self._command, questions)]
        role, *replies = await self._ask(commands)
        if any(isinstance(reply, NoScriptError) for reply in replies):  # Redis was started anew, or its scripts were flushed
            await self._connection.send_command("SCRIPT", "LOAD", self._source)
            await self._connection.read_response()
            role, *replies = await self._ask(commands)
        if isinstance(role, list) and role[0] == b"slave":  # a user who may not ask gets an error: then READONLY has to tell
            raise ReadOnly("Redis is a read-only replica: see that the URL leads to the primary")
        return [_answer(reply) for reply in replies]

    async def _ask(self, commands: Sequence[bytes]) -> list[Any]:
        await self._connection.send_packed_command(b"".join(commands), check_health=False)
        return [await self._reply() for _ in commands]

    async def _reply(self) -> Any:
        try:
            return await self._connection.read_response()
        except ResponseError as error:
            return error

    def _command(self, question: Question) -> bytes:
        packed = self._packed.get(question)
        if packed is None:
            command = ["EVALSHA", self._sha, 2, question.keys.runs, question.keys.born, *_arguments(question.idle_ms)]
            packed = self._packed[question] = b"".join(self._connection.pack_command(*command))
        return packed


def _arguments(idle_ms: int) -> list[str | int]:
    return [GROUP, idle_ms, COUNT_ALWAYS, COUNT_AT_MOST, PENDING_AT_MOST]


def _answer(reply: Any) -> Reading | AgentrunError:
    """What concerns one question; raises what concerns the whole Redis."""
    if not isinstance(reply, ResponseError):
        return _reading(reply)
    error = translate(reply)
    if isinstance(error, BusUnavailable) and not isinstance(error, GroupMissing):
        raise error
    return error


def _reading(reply: Sequence[Any]) -> Reading:
    undelivered, pending, idle, age_ms = reply[:4]
    held = {name.decode("utf-8", "replace"): count for name, count in zip(reply[4::2], reply[5::2], strict=True)}
    return Reading(Demand(undelivered, pending - idle, idle), held, age_ms / 1000 if age_ms >= 0 else None)
