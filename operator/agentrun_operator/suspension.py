"""Whether spec.suspend is in effect: not what the spec says, but what the gateways that run have read. Pure."""

from agentrun_operator.availability import count, is_rolled_out, wanted
from agentrun_operator.checks import Finding
from agentrun_operator.conditions import Status
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.render.config import is_suspended
from agentrun_operator.render.deployments import mounted_config
from agentrun_operator.render.names import Component
from agentrun_operator.resources import CONFIGMAPS, Ref
from agentrun_operator.situation import Situation


def suspended(situation: Situation, *, changing: frozenset[Component]) -> Finding | None:
    """The condition, while the gateways refuse messages. It stays as it is while they are replaced."""
    gateway, manifest = situation.child(Component.GATEWAY), situation.observed.manifest
    if gateway is None or Component.GATEWAY in changing or not is_rolled_out(gateway):
        refuses = situation.old_condition(ConditionType.SUSPENDED) is not None
    else:
        refuses = _has_read_it(situation)
    if not refuses:
        return None
    if manifest is not None and not manifest.spec.suspend:
        return _true("spec.suspend is not set any more; messages are refused until the gateway is replaced, see Ready")
    worker = situation.child(Component.WORKER)
    if worker is not None and (wanted(worker) or count(worker, "replicas")):
        return _true(
            "spec.suspend is set: no new messages are taken, and workers end when they are done and nothing else scales them"
        )
    return _true("spec.suspend is set: no new messages are taken, and there are no workers")


def not_in_effect(situation: Situation) -> str:
    """What the summary adds where something stands between spec.suspend and the gateways."""
    gateway = situation.child(Component.GATEWAY)
    if situation.observed.manifest is None or not situation.manifest.spec.suspend or gateway is None or _has_read_it(situation):
        return ""
    return "; until then spec.suspend ends the workers only, and the gateway goes on taking messages"


def _has_read_it(situation: Situation) -> bool:
    gateway = situation.child(Component.GATEWAY)
    name = mounted_config(gateway) if gateway is not None else None
    found = situation.observed.children.get(Ref(CONFIGMAPS, situation.observed.key.namespace, name)) if name else None
    return found is not None and is_suspended(found)


def _true(message: str) -> Finding:
    return Finding(Status.TRUE, Reason.SUSPENDED, message)
