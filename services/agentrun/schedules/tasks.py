"""A CronTask as its row has it, made ready to be decided. Fields that an older writer did not know have their defaults."""

from contextlib import suppress
from datetime import datetime, timedelta

import msgspec

from agentrun.domain import cron
from agentrun.domain.cron import CronError, Schedule
from agentrun.schedules.decision import CatchUp, Concurrency, Rules, Stretch


class _Session(msgspec.Struct, rename="camel", frozen=True):
    mode: str = "PerSlot"
    id: str | None = None


class _CatchUp(msgspec.Struct, rename="camel", frozen=True):
    mode: CatchUp = CatchUp.ALL
    limit: int = 10


class _Superseded(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """Times that an edit replaced: they hold for slots later than `after`, up to `until`."""

    schedule: str
    time_zone: str = "Etc/UTC"
    suspend: bool = False
    after: datetime
    until: datetime


class Task(msgspec.Struct, rename="camel", frozen=True, kw_only=True):
    """What the scheduler reads of a CronTask's spec; `manifests/crontask.py` says what it means."""

    name: str
    schedule: str
    time_zone: str = "Etc/UTC"
    input: str
    session: _Session = _Session()
    concurrency_policy: Concurrency = Concurrency.ALLOW
    starting_deadline_seconds: int | None = None
    catch_up: _CatchUp = _CatchUp()
    jitter_seconds: int = 0
    suspend: bool = False
    history_limit: int = 1000
    superseded: tuple[msgspec.Raw, ...] = ()

    @property
    def fixed_session(self) -> str | None:
        """The one session of all runs; None: each slot has its own."""
        return self.session.id if self.session.mode == "Fixed" else None

    @property
    def rules(self) -> Rules:
        return Rules(
            concurrency=self.concurrency_policy,
            deadline=None if self.starting_deadline_seconds is None else timedelta(seconds=self.starting_deadline_seconds),
            catch_up=self.catch_up.mode,
            limit=self.catch_up.limit,
            history=self.history_limit,
        )

    def when(self, *, namespace: str) -> Schedule:
        """Its slots. Raises CronError."""
        return cron.parse(self.schedule, self.time_zone, seed=cron.seed(namespace, self.name))

    def before(self, *, namespace: str) -> list[Stretch]:
        """The times that held before and whose slots may be undecided, oldest first; none of those that cannot be followed."""
        found = []
        for raw in self.superseded:
            with suppress(msgspec.ValidationError, CronError):
                one = _stretches.decode(raw)
                schedule = cron.parse(one.schedule, one.time_zone, seed=cron.seed(namespace, self.name))
                found.append(Stretch(schedule, one.after, one.until, one.suspend))
        return found


_stretches = msgspec.json.Decoder(_Superseded)
_decoder = msgspec.json.Decoder(Task)


def read(spec: str) -> Task:
    """The task of a row's JSON. Raises msgspec.ValidationError, msgspec.DecodeError."""
    return _decoder.decode(spec)
