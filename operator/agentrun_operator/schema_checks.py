"""The checks behind SchemaReady: the database can be used, is this AgentRun's, and has what the image needs. Pure.

With `migrations: Apply` a migration by the same image comes before each roll-out of a new image or onto another database, also where this
operator needs nothing more: what an image of another version needs only that image knows. It also reserves the database for the AgentRun.
"""

from urllib.parse import urlsplit

from agentrun.control.schema_gate import Decision, Verdict
from agentrun_operator.checks import Finding, no, place, unknown
from agentrun_operator.conditions import Status
from agentrun_operator.facts import Object, StoreProblem
from agentrun_operator.jobs import is_complete, job_condition, seconds_to_start
from agentrun_operator.pod_troubles import again_after
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.situation import Situation

MIGRATION_SETTLES_SECONDS = 15.0
"""So long after a migration the answer about the schema may still be the one from before it."""

_DATABASE_PROBLEMS = {
    StoreProblem.UNREACHABLE: (
        Status.UNKNOWN,
        Reason.DATABASE_UNREACHABLE,
        "Postgres does not answer at the URL in {secret}; check that it runs, and that the operator may connect to it "
        "(networkPolicy.storePorts of the chart)",
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
    StoreProblem.BAD_CERTIFICATE: (
        Status.FALSE,
        Reason.DATABASE_URL_INVALID,
        "the operator has no certificate file as the URL in {secret} asks for it; sslmode=verify-full needs sslrootcert=FILE, a file "
        "with the certificate authority in the operator's pods (extraVolumes of the chart) and in those of the AgentRun",
    ),
    StoreProblem.UNTRUSTED: (
        Status.FALSE,
        Reason.DATABASE_TLS_FAILED,
        "the certificate of Postgres at the URL in {secret} is not accepted; check that the file of sslrootcert holds its authority, that "
        "it is for this host, and that it has not expired",
    ),
    StoreProblem.NO_TLS: (
        Status.FALSE,
        Reason.DATABASE_TLS_FAILED,
        "Postgres at the URL in {secret} speaks no TLS, which its sslmode asks for; switch it on there",
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
        return unknown(Reason.PENDING, "the database has not answered yet", again=10.0)
    if fact.problem is None:
        return None
    status, reason, message = _DATABASE_PROBLEMS.get(fact.problem, _DATABASE_PROBLEMS[StoreProblem.REFUSED])
    ref = situation.manifest.spec.store_secrets().database
    return Finding(status, reason, message.format(secret=place(ref.name, ref.key)))


def database_is_ours(situation: Situation) -> Finding | None:
    """Two AgentRuns on one database would reap each other's runs."""
    fact = situation.observed.schema
    if fact is not None and fact.owner not in (None, str(situation.observed.key)):
        return no(
            Reason.DATABASE_NOT_OURS,
            f"the database belongs to the AgentRun {fact.owner}; give {situation.observed.key} a database of its own",
        )
    return None


def schema_is_not_too_new(situation: Situation) -> Finding | None:
    """A schema that has given up what this version needs."""
    verdict = situation.verdict
    if verdict is not None and verdict.verdict is Verdict.REFUSE:
        return no(Reason.SCHEMA_TOO_NEW, f"{verdict.message}; pods that run are left as they are")
    return None


def schema_is_there(situation: Situation) -> Finding | None:
    """Behind, or not known for this image: a migration, by the Job or by people."""
    verdict = situation.verdict
    if verdict is None or (verdict.serves and (situation.is_migrated or not situation.applies_migrations)):
        return None
    if not situation.applies_migrations:
        ref, key = situation.manifest.spec.store_secrets().database, situation.observed.key
        return no(
            Reason.MIGRATION_NEEDED,
            f"{verdict.message} (image {situation.image}) with DATABASE_URL from {place(ref.name, ref.key)} "
            f"and AGENTRUN_NAMESPACE={key.namespace} AGENTRUN_NAME={key.name}",
        )
    if situation.migration_at_work is not None:
        former = situation.migration_at_work.name
        return unknown(
            Reason.MIGRATING,
            f"the Job {former} of an earlier spec is to end before the next one begins; {_log_of(situation, former)}",
        )
    return _url_is_wrong(situation) or _state_of_the_job(situation, verdict)


SCHEMA = (database_answers, database_is_ours, schema_is_not_too_new, schema_is_there)


def _url_is_wrong(situation: Situation) -> Finding | None:
    """The operator never connects with the stronger role, so that only the form of its URL can be looked at."""
    ref = situation.manifest.spec.database.migration_secret_ref
    state = situation.secret(ref.name, ref.key) if ref is not None else None
    if ref is None or state is None or _is_url(state.value):
        return None
    return no(
        Reason.DATABASE_URL_INVALID,
        f"{place(ref.name, ref.key)} (spec.database.migrationSecretRef) holds no URL of Postgres; "
        "write postgresql://user:password@host/database, with special characters of the password as %5B and the like",
    )


def _is_url(value: str) -> bool:
    try:
        return urlsplit(value).scheme in ("postgresql", "postgres")
    except ValueError:
        return False


def _state_of_the_job(situation: Situation, verdict: Decision) -> Finding:
    """The Job for this image and database: not made yet, at work, or ended without the schema being there."""
    name = situation.migration.name
    log = _log_of(situation, name)
    job = situation.observed.children.get(situation.migration)
    if job is None or "deletionTimestamp" in job["metadata"]:
        return unknown(Reason.MIGRATING, f"the Job {name} brings the schema up to date; {log}")
    failed = job_condition(job, "Failed")
    if failed is not None:
        said = _trouble(situation) or str(failed.get("message") or failed.get("reason") or "").rstrip(".")
        return no(
            Reason.MIGRATION_FAILED,
            f"the migration failed ({said}): see {log}; it runs again when image, secret or podTemplate change, "
            "or when the Job is deleted",
        )
    if not is_complete(job):
        return _unfinished(situation, name, job)
    if situation.observed.migrated_seconds > MIGRATION_SETTLES_SECONDS or _was_too_old(situation):
        other = ", and check that both secrets of spec.database lead to the same database"
        own = situation.manifest.spec.database.migration_secret_ref
        return no(
            Reason.IMAGE_TOO_OLD,
            f"the migration of image {situation.image} has ended and {verdict.message.partition(';')[0]}; use an image of the "
            f"operator's version{other if own else ''}",
        )
    return unknown(Reason.MIGRATING, f"the Job {name} brings the schema up to date; {log}", again=2.0)


def _unfinished(situation: Situation, name: str, job: Object) -> Finding:
    again = again_after(situation.observed.troubled_seconds)
    if said := _trouble(situation):
        return unknown(Reason.MIGRATING, f"the Job {name} does not succeed: {said}; {_log_of(situation, name)}", again=again)
    left = seconds_to_start(job, situation.now)
    if left <= 0:
        return unknown(
            Reason.MIGRATING,
            f"the pod of the Job {name} has not started for minutes; "
            f"kubectl describe -n {situation.observed.key.namespace} job/{name}, and pods -l job-name={name}",
            again=again,
        )
    return unknown(
        Reason.MIGRATING,
        f"the Job {name} brings the schema up to date; {_log_of(situation, name)}",
        again=min(left + 1.0, again) if left < float("inf") else None,
    )


def _trouble(situation: Situation) -> str:
    return situation.observed.troubles.get(situation.migration.name, "")


def _was_too_old(situation: Situation) -> bool:
    """An operator that has just started says what the one before it had found out about the same Job."""
    old = situation.old_condition(ConditionType.SCHEMA_READY)
    return old is not None and old.get("reason") == Reason.IMAGE_TOO_OLD


def _log_of(situation: Situation, job: str) -> str:
    return f"kubectl logs -n {situation.observed.key.namespace} job/{job}"
