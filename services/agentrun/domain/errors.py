"""The errors that cross rooms.

AgentrunError
├── ManifestError        a manifest says something that cannot be run: file, field, remedy
├── ConfigurationError   an environment variable or file is missing or wrong
├── StoreUnavailable     Postgres does not answer: try again later
├── SchemaMismatch       the database's schema is not one that this version can use
├── MigrationRefused     Postgres refuses a statement of a migration
├── BusUnavailable       Redis does not answer: what is in Postgres is safe
├── BusMisconfigured     Redis answers, and may lose keys (maxmemory-policy) or is too old
└── Fenced               this attempt no longer owns its run; everything it wrote after that changed nothing
"""


class AgentrunError(Exception):
    """Base of all errors that agentrun raises on purpose. The message says what is wrong, where, and what to do."""


class ManifestError(AgentrunError):
    """One line: file, field, what is wrong, remedy."""


class ConfigurationError(AgentrunError):
    """A setting is missing or wrong."""


class StoreUnavailable(AgentrunError):
    """Postgres cannot be reached or is shutting down; nothing is known about the last statement."""


class SchemaMismatch(AgentrunError):
    """The schema in the database is older or newer than this version accepts."""


class MigrationRefused(AgentrunError):
    """Postgres refuses a statement of a migration: which one, and why. Nothing of that migration stays."""


class BusUnavailable(AgentrunError):
    """Redis cannot be reached, is loading, or is read-only."""


class BusMisconfigured(AgentrunError):
    """Redis must not be used as it is set up."""


class Fenced(AgentrunError):
    """The attempt has been ended by somebody else."""
