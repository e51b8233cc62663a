"""The closed lists of condition types, condition reasons and event reasons. Nobody else makes one up."""

from enum import StrEnum


class ConditionType(StrEnum):
    """Conditions of an AgentRun, in the order in which they are shown and in which Ready looks at them."""

    READY = "Ready"
    """The summary: the new spec is in place, messages are taken and worked on."""
    ACCEPTED = "Accepted"
    """The spec can be used, and no object of somebody else has a name that is needed."""
    SCHEMA_READY = "SchemaReady"
    """The database is there, is this AgentRun's, and has a schema on which this version may work."""
    QUEUE_READY = "QueueReady"
    """Redis is there and keeps what it is given."""
    GATEWAY_AVAILABLE = "GatewayAvailable"
    """At least one gateway serves."""
    WORKERS_AVAILABLE = "WorkersAvailable"
    """At least one of the wanted workers is up, or none is wanted."""
    SCALING_ACTIVE = "ScalingActive"
    """The number of workers follows the demand."""
    STALLED = "Stalled"
    """Only while True: nothing goes on until somebody changes something."""
    SUSPENDED = "Suspended"
    """Only while True: the gateway takes no messages, as spec.suspend says."""
    BUDGET_EXHAUSTED = "BudgetExhausted"
    """Only while True: the gateway refuses messages, since the day has spent what it may."""
    CALLS_UNPRICED = "CallsUnpriced"
    """Only while True: calls of the last day have no price."""


ALWAYS_PRESENT = (
    ConditionType.READY,
    ConditionType.ACCEPTED,
    ConditionType.SCHEMA_READY,
    ConditionType.QUEUE_READY,
    ConditionType.GATEWAY_AVAILABLE,
    ConditionType.WORKERS_AVAILABLE,
    ConditionType.SCALING_ACTIVE,
)


class Reason(StrEnum):
    """Why a condition is as it is."""

    # Any condition.
    PENDING = "Pending"
    """Nothing has been looked at yet."""
    NOT_EVALUATED = "NotEvaluated"
    """An earlier condition stands in the way."""
    # Accepted, for each Secret that is named.
    SECRET_MISSING = "SecretMissing"  # noqa: S105
    SECRET_KEY_MISSING = "SecretKeyMissing"  # noqa: S105
    SECRET_UNREADABLE = "SecretUnreadable"  # noqa: S105
    """The operator may not read it."""
    # Ready.
    READY = "Ready"
    ROLLING_OUT = "RollingOut"
    """Pods are being replaced."""
    ROLL_OUT_FAILED = "RollOutFailed"
    """The new pods do not come up."""
    SUSPENDED = "Suspended"
    SCHEDULER_UNAVAILABLE = "SchedulerUnavailable"
    # Accepted.
    ACCEPTED = "Accepted"
    INVALID_SPEC = "InvalidSpec"
    NAME_TAKEN = "NameTaken"
    PREDECESSOR_REMAINS = "PredecessorRemains"
    """Objects of a deleted AgentRun of this name are still being removed."""
    OBJECT_REFUSED = "ObjectRefused"
    """The API server does not take an object that follows from the spec."""
    IMAGE_MISSING = "ImageMissing"
    """Neither spec.image nor an image of the operator."""
    OPERATOR_ERROR = "OperatorError"
    """The operator has a bug that shows with this AgentRun."""
    # BudgetExhausted.
    DAY_SPENT = "DaySpent"
    # CallsUnpriced.
    PRICE_UNKNOWN = "PriceUnknown"
    # Accepted of a CronTask.
    AGENT_RUN_MISSING = "AgentRunMissing"
    SCHEDULE_INVALID = "ScheduleInvalid"
    TIME_ZONE_UNKNOWN = "TimeZoneUnknown"
    # SchemaReady.
    SCHEMA_READY = "SchemaReady"
    MIGRATING = "Migrating"
    MIGRATION_FAILED = "MigrationFailed"
    MIGRATION_NEEDED = "MigrationNeeded"
    """With migrations: Verify somebody has to run it."""
    IMAGE_TOO_OLD = "ImageTooOld"
    """The migration of this image ended and left a schema below what is needed."""
    SCHEMA_TOO_NEW = "SchemaTooNew"
    DATABASE_NOT_OURS = "DatabaseNotOurs"
    DATABASE_UNREACHABLE = "DatabaseUnreachable"
    DATABASE_REFUSED = "DatabaseRefused"
    DATABASE_URL_INVALID = "DatabaseUrlInvalid"
    DATABASE_TLS_FAILED = "DatabaseTlsFailed"
    # QueueReady.
    QUEUE_READY = "QueueReady"
    REDIS_UNREACHABLE = "RedisUnreachable"
    REDIS_REFUSED = "RedisRefused"
    REDIS_URL_INVALID = "RedisUrlInvalid"
    REDIS_TLS_FAILED = "RedisTlsFailed"
    REDIS_TOO_OLD = "RedisTooOld"
    REDIS_EVICTS = "RedisEvicts"
    # GatewayAvailable, WorkersAvailable.
    AVAILABLE = "Available"
    STARTING = "Starting"
    UNAVAILABLE = "Unavailable"
    SCALED_TO_ZERO = "ScaledToZero"
    # ScalingActive.
    DEMAND_KNOWN = "DemandKnown"
    DEMAND_UNKNOWN = "DemandUnknown"
    EXTERNAL = "External"
    FOREIGN_SCALER = "ForeignScaler"


class EventReason(StrEnum):
    """Events on the AgentRun: what a person would want to have been told."""

    READY = "Ready"
    NOT_READY = "NotReady"
    MIGRATION_STARTED = "MigrationStarted"
    MIGRATION_FAILED = "MigrationFailed"
    MIGRATED = "Migrated"
    ROLLED_OUT = "RolledOut"
    """New pods were asked for: image, configuration or secret changed."""
    DRIFT_CORRECTED = "DriftCorrected"
    """Somebody had changed or deleted an object of ours."""
    SUSPENDED = "Suspended"
    RESUMED = "Resumed"
    SCALED = "Scaled"
    """The scaler's: the number of workers was changed."""
    SCALER_CONFLICT = "ScalerConflict"
    """The scaler's: somebody else scales the workers too."""
