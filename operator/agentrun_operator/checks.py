"""The ordered checks behind the conditions: each looks at one thing and says what is wrong and what to do, or nothing. Pure.

The first finding of a list is the condition. Messages are static: no counters, no times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrun.control.schema_gate import Verdict
from agentrun_operator.conditions import Status, seconds_since
from agentrun_operator.facts import Object, SecretPresence, StoreProblem
from agentrun_operator.reasons import Reason
from agentrun_operator.situation import WHOLE_SECRET, Situation

MIGRATION_SETTLES_SECONDS = 15.0
"""So long after a migration the answer about the schema may still be the one from before it."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition says. `again` asks for another look after so many seconds, where no event will come."""

    status: Status
    reason: Reason
    message: str
    again: float | None = None

    @property
    def true(self) -> bool:
        """Whether nothing stands in the way."""
        return self.status is Status.TRUE


Check = Callable[[Situation], Finding | None]


def first(checks: Sequence[Check], situation: Situation, otherwise: Finding) -> Finding:
    """The first finding, else that all is well."""
    return next((finding for check in checks if (finding := check(situation)) is not None), otherwise)


def _no(reason: Reason, message: str) -> Finding:
    return Finding(Status.FALSE, reason, message)


def _unknown(reason: Reason, message: str, again: float | None = None) -> Finding:
    return Finding(Status.UNKNOWN, reason, message, again)


# --- Accepted -----------------------------------------------------------------------------------------------------------------------


def spec_is_valid(situation: Situation) -> Finding | None:
    """The API server admits what the CRD allows; an operator of another version may see it differently."""
    if situation.observed.manifest is None:
        return _no(Reason.INVALID_SPEC, situation.observed.error)
    return None


def there_is_an_image(situation: Situation) -> Finding | None:
    """Pods need one."""
    if not situation.image:
        return _no(
            Reason.IMAGE_MISSING, "there is no image for the pods; set spec.image, or AGENTRUN_OPERATOR_IMAGE of the operator"
        )
    return None


def names_are_free(situation: Situation) -> Finding | None:
    """What somebody else made is never touched."""
    taken = sorted(map(str, situation.observed.foreign))
    if taken:
        return _no(
            Reason.NAME_TAKEN,
            f"{', '.join(taken)} belongs to somebody else; remove or rename it, or give the AgentRun another name",
        )
    return None


def predecessor_is_gone(situation: Situation) -> Finding | None:
    """A new AgentRun does not take over the pods of a deleted one."""
    if situation.observed.remains:
        return _unknown(Reason.PREDECESSOR_REMAINS, "objects of a deleted AgentRun of this name are being removed", again=1.0)
    return None


def secrets_are_there(situation: Situation) -> Finding | None:
    """Pods without their secrets would not start; those that run go on with what they have."""
    for use in situation.secrets_used:
        state = situation.secret(use.name, use.key)
        presence = state.presence if state is not None else SecretPresence.UNKNOWN
        what = f"the Secret {use.name} ({use.field})"
        key = f"with the key {use.key}" if use.key != WHOLE_SECRET else "with the variables that the agent needs"
        if presence is SecretPresence.NO_SECRET:
            return _no(Reason.SECRET_MISSING, f"{what} is not there; create it {key}; pods that run keep running")
        if presence is SecretPresence.NO_KEY:
            return _no(Reason.SECRET_KEY_MISSING, f"{what} has no key {use.key}; add it; pods that run keep running")
        if presence is SecretPresence.UNKNOWN:
            return _unknown(
                Reason.SECRET_UNREADABLE, f"the operator may not read {what}; grant it get on secrets here", again=60.0
            )
    return None


def objects_are_taken(situation: Situation) -> Finding | None:
    """A quota, an admission webhook, or a part of spec.podTemplate that only the API server can judge."""
    refusal = situation.observed.refusal
    if refusal is not None:
        return Finding(
            Status.FALSE,
            Reason.OBJECT_REFUSED,
            f"the API server refused {refusal.ref}: {refusal.message}; change the spec or what refuses it",
            again=60.0,
        )
    return None


ACCEPTED = (spec_is_valid, there_is_an_image, names_are_free, predecessor_is_gone, secrets_are_there, objects_are_taken)


# --- SchemaReady --------------------------------------------------------------------------------------------------------------------

_DATABASE_PROBLEMS = {
    StoreProblem.UNREACHABLE: (
        Status.UNKNOWN,
        Reason.DATABASE_UNREACHABLE,
        "Postgres does not answer at the URL in {secret}; check that it runs, and that the operator may connect to it",
    ),
    StoreProblem.REFUSED: (
        Status.FALSE,
        Reason.DATABASE_REFUSED,
        "Postgres refuses the URL in {secret}; check user, password, database and rights",
    ),
    StoreProblem.BAD_URL: (
        Status.FALSE,
        Reason.DATABASE_URL_INVALID,
        "{secret} holds no URL of Postgres; write postgresql://user:password@host/database",
    ),
    StoreProblem.OTHER_APPLICATION: (
        Status.FALSE,
        Reason.DATABASE_NOT_OURS,
        "the database in {secret} belongs to another application; give the AgentRun a database of its own",
    ),
}


def database_answers(situation: Situation) -> Finding | None:
    """Nothing is rolled out on a database that nobody can ask."""
    fact = situation.observed.schema
    if fact is None:
        return _unknown(Reason.PENDING, "the database has not answered yet", again=10.0)
    if fact.problem is None:
        return None
    status, reason, message = _DATABASE_PROBLEMS.get(fact.problem, _DATABASE_PROBLEMS[StoreProblem.REFUSED])
    ref = situation.manifest.spec.store_secrets().database
    return Finding(status, reason, message.format(secret=_place(ref.name, ref.key)))


def database_is_ours(situation: Situation) -> Finding | None:
    """Two AgentRuns on one database would reap each other's runs."""
    fact = situation.observed.schema
    if fact is not None and fact.owner not in (None, str(situation.observed.key)):
        return _no(
            Reason.DATABASE_NOT_OURS,
            f"the database belongs to the AgentRun {fact.owner}; give {situation.observed.key} a database of its own",
        )
    return None


def schema_is_not_too_new(situation: Situation) -> Finding | None:
    """A schema that has given up what this version needs."""
    verdict = situation.verdict
    if verdict is not None and verdict.verdict is Verdict.REFUSE:
        return _no(Reason.SCHEMA_TOO_NEW, f"{verdict.message}; pods that run are left as they are")
    return None


def schema_is_there(situation: Situation) -> Finding | None:
    """Behind: a migration, by the Job or by people."""
    verdict = situation.verdict
    if verdict is None or verdict.verdict is not Verdict.MIGRATE:
        return None
    refs, name = situation.manifest.spec.store_secrets(), situation.migration.name
    if situation.manifest.spec.database.migrations == "Verify":
        return _no(
            Reason.MIGRATION_NEEDED,
            f"{verdict.message} (image {situation.image}) with DATABASE_URL from {_place(refs.database.name, refs.database.key)} "
            f"and AGENTRUN_NAMESPACE={situation.observed.key.namespace} AGENTRUN_NAME={situation.observed.key.name}",
        )
    job = situation.observed.children.get(situation.migration)
    where = f"kubectl logs -n {situation.observed.key.namespace} job/{name}"
    if job is None or "deletionTimestamp" in job["metadata"]:
        return _unknown(Reason.MIGRATING, f"the Job {name} brings the schema up to date; {where}")
    failed, complete = job_condition(job, "Failed"), job_condition(job, "Complete")
    if failed is not None:
        said = str(failed.get("message") or failed.get("reason") or "").rstrip(".")
        return _no(
            Reason.MIGRATION_FAILED,
            f"the migration failed ({said}): see {where}; it runs again when image, secret or podTemplate change, "
            "or when the Job is deleted",
        )
    if complete is not None and seconds_since(complete, situation.now) > MIGRATION_SETTLES_SECONDS:
        return _no(
            Reason.IMAGE_TOO_OLD,
            f"the migration of image {situation.image} has ended and {verdict.message.partition(';')[0]}; use an image of the "
            "operator's version",
        )
    settles = 2.0 if complete is not None else None
    return _unknown(Reason.MIGRATING, f"the Job {name} brings the schema up to date; {where}", again=settles)


SCHEMA = (database_answers, database_is_ours, schema_is_not_too_new, schema_is_there)


# --- QueueReady ---------------------------------------------------------------------------------------------------------------------

_REDIS_PROBLEMS = {
    StoreProblem.UNREACHABLE: (
        Status.UNKNOWN,
        Reason.REDIS_UNREACHABLE,
        "Redis does not answer at the URL in {secret}; check that it runs, and that the operator may connect to it",
    ),
    StoreProblem.REFUSED: (
        Status.FALSE,
        Reason.REDIS_REFUSED,
        "Redis refuses the URL in {secret}; check user, password and rights",
    ),
    StoreProblem.BAD_URL: (
        Status.FALSE,
        Reason.REDIS_URL_INVALID,
        "{secret} holds no URL of Redis; write redis://user:password@host:6379/0, or rediss:// for TLS",
    ),
    StoreProblem.TOO_OLD: (
        Status.FALSE,
        Reason.REDIS_TOO_OLD,
        "the Redis in {secret} is too old; use Redis 7.0 or Valkey 8, or newer",
    ),
    StoreProblem.EVICTS: (
        Status.FALSE,
        Reason.REDIS_EVICTS,
        "the Redis in {secret} may drop keys; set its maxmemory-policy to noeviction",
    ),
}


def queue_answers(situation: Situation) -> Finding | None:
    """Redis is there and may be trusted with the queue."""
    fact = situation.observed.queue
    if fact is None:
        return _unknown(Reason.PENDING, "Redis has not answered yet", again=10.0)
    if fact.problem is None:
        return None
    status, reason, message = _REDIS_PROBLEMS.get(fact.problem, _REDIS_PROBLEMS[StoreProblem.REFUSED])
    ref = situation.manifest.spec.store_secrets().redis
    return Finding(status, reason, message.format(secret=_place(ref.name, ref.key)))


QUEUE = (queue_answers,)


def _place(name: str, key: str) -> str:
    return f"Secret {name}, key {key}"


def job_condition(job: Object, kind: str) -> Object | None:
    """A condition of a Job that is True."""
    conditions = (job.get("status") or {}).get("conditions") or ()
    return next((one for one in conditions if one.get("type") == kind and one.get("status") == "True"), None)
