"""The ordered checks behind the conditions: each looks at one thing and says what is wrong and what to do, or nothing. Pure.

The first finding of a list is the condition. Messages are static: no counters, no times.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from agentrun_operator.conditions import Status
from agentrun_operator.facts import SecretPresence, StoreProblem
from agentrun_operator.reasons import Reason
from agentrun_operator.situation import WHOLE_SECRET, Situation

_NAMED_REMAINS = 5


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


def no(reason: Reason, message: str) -> Finding:
    """Something is wrong."""
    return Finding(Status.FALSE, reason, message)


def unknown(reason: Reason, message: str, again: float | None = None) -> Finding:
    """It is not known yet, or not decided."""
    return Finding(Status.UNKNOWN, reason, message, again)


# --- Accepted -----------------------------------------------------------------------------------------------------------------------


def spec_is_valid(situation: Situation) -> Finding | None:
    """The API server admits what the CRD allows; an operator of another version may see it differently."""
    if situation.observed.manifest is None:
        return no(Reason.INVALID_SPEC, situation.observed.error)
    return None


def there_is_an_image(situation: Situation) -> Finding | None:
    """Pods need one."""
    if not situation.image:
        return no(
            Reason.IMAGE_MISSING, "there is no image for the pods; set spec.image, or AGENTRUN_OPERATOR_IMAGE of the operator"
        )
    return None


def names_are_free(situation: Situation) -> Finding | None:
    """What somebody else made is never touched."""
    taken = sorted(map(str, situation.observed.foreign))
    if taken:
        return no(
            Reason.NAME_TAKEN,
            f"{', '.join(taken)} belongs to somebody else; remove or rename it, or give the AgentRun another name",
        )
    return None


def predecessor_is_gone(situation: Situation) -> Finding | None:
    """A new AgentRun does not take over the pods of a deleted one."""
    remains = sorted(map(str, situation.observed.remains))
    if not remains:
        return None
    named = ", ".join(remains[:_NAMED_REMAINS]) + (" and others" if len(remains) > _NAMED_REMAINS else "")
    return unknown(
        Reason.PREDECESSOR_REMAINS,
        f"objects of a deleted AgentRun of this name are being removed: {named}; if one stays, look at the finalizers in its metadata",
        again=5.0,
    )


def secrets_are_there(situation: Situation) -> Finding | None:
    """Pods without their secrets would not start; those that run go on with what they have."""
    for use in situation.secrets_used:
        state = situation.secret(use.name, use.key)
        presence = state.presence if state is not None else SecretPresence.UNKNOWN
        what = f"the Secret {use.name} ({use.field})"
        key = f"with the key {use.key}" if use.key != WHOLE_SECRET else "with what the agent needs"
        if presence is SecretPresence.NO_SECRET:
            return no(Reason.SECRET_MISSING, f"{what} is not there; create it {key}; pods that run keep running")
        if presence is SecretPresence.NO_KEY:
            return no(Reason.SECRET_KEY_MISSING, f"{what} has no key {use.key}; add it; pods that run keep running")
        if presence is SecretPresence.UNKNOWN:
            return unknown(
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


def schedules_left_alone(situation: Situation) -> str:
    """What Accepted adds where schedules are fired that nobody can see, change or delete."""
    fact = situation.observed.schema
    if situation.observed.cron_tasks_served or fact is None or not fact.has_schedules:
        return ""
    return "; schedules go on although the kind CronTask is not installed: apply its CRD, and they are looked after again"


ACCEPTED = (spec_is_valid, there_is_an_image, names_are_free, predecessor_is_gone, secrets_are_there, objects_are_taken)


# --- QueueReady ---------------------------------------------------------------------------------------------------------------------

_REDIS_PROBLEMS = {
    StoreProblem.UNREACHABLE: (
        Status.UNKNOWN,
        Reason.REDIS_UNREACHABLE,
        "Redis does not answer at the URL in {secret}; check that it runs, that its port speaks TLS just where the URL says rediss://, and "
        "that the operator may connect to it (networkPolicy.storePorts of the chart)",
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
    StoreProblem.BAD_CERTIFICATE: (
        Status.FALSE,
        Reason.REDIS_URL_INVALID,
        "the operator has no certificate file as the URL in {secret} names it (ssl_ca_certs); mount it into the operator's pods "
        "(extraVolumes of the chart) and into those of the AgentRun",
    ),
    StoreProblem.UNTRUSTED: (
        Status.FALSE,
        Reason.REDIS_TLS_FAILED,
        "the certificate of Redis at the URL in {secret} is not accepted; check that the file of ssl_ca_certs holds its authority, that "
        "it is for this host, and that it has not expired",
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
        return unknown(Reason.PENDING, "Redis has not answered yet", again=10.0)
    if fact.problem is None:
        return None
    status, reason, message = _REDIS_PROBLEMS.get(fact.problem, _REDIS_PROBLEMS[StoreProblem.REFUSED])
    ref = situation.manifest.spec.store_secrets().redis
    kept = "; pods that run keep the Redis that they have" if situation.redis_is_new else ""
    return Finding(status, reason, message.format(secret=place(ref.name, ref.key)) + kept)


QUEUE = (queue_answers,)


def place(name: str, key: str) -> str:
    """How messages name a key of a Secret."""
    return f"Secret {name}, key {key}"
