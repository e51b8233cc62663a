"""What is followed of an AgentRun: the stores that its pods have. Pure.

The Secrets may name others already. Demand that is asked of a Redis that no pod uses is none, and would end busy workers.
"""

from agentrun_operator.facts import Observed
from agentrun_operator.plan import Plan
from agentrun_operator.render.names import Component, component
from agentrun_operator.targets import Mode, Target, target_of


def followed(observed: Observed, plan: Plan, last: Target | None) -> Target | None:
    """The target after a reconcile; `last` is the one before it. None: which stores the pods have is not known, so all is held."""
    if last is not None and last.uid != observed.uid:
        last = None
    manifest = observed.manifest
    if manifest is None:
        return last
    spec = manifest.spec
    refs = spec.store_secrets()
    if plan.stores_in_use:
        redis_url = observed.secrets[(refs.redis.name, refs.redis.key)].value
        database_url = observed.secrets[(refs.database.name, refs.database.key)].value
        schema_ready = plan.schema_ready
    elif last is not None:
        redis_url, database_url, schema_ready = last.redis_url, last.database_url, last.schema_ready
    else:
        return None
    return target_of(
        manifest,
        uid=observed.uid,
        redis_url=redis_url,
        database_url=database_url,
        worker=component(observed.key, Component.WORKER).name,
        scheduler=component(observed.key, Component.SCHEDULER).name,
        mode=Mode(spec.scaling.mode),
        suspended=spec.suspend,
        schema_ready=schema_ready,
    )
