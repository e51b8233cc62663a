"""Whether what should run does run: the checks on Deployments, and the summary. Pure.

Workers that start again from zero do not take Ready away: messages are taken and will be worked on. Workers that do not come up do.
"""

from collections.abc import Mapping

from agentrun_operator.checks import Finding
from agentrun_operator.conditions import Status, age, find, seconds_since
from agentrun_operator.facts import Object, ScalingState
from agentrun_operator.pod_troubles import again_after, may_be_in_trouble
from agentrun_operator.reasons import ConditionType, Reason
from agentrun_operator.render.labels import DESIRED_DIGEST, TEMPLATE_DIGEST, selector
from agentrun_operator.render.names import SERVING, Component
from agentrun_operator.situation import Situation

STARTING_SECONDS = 120.0
"""Pods that are not there after so long count as failed."""


def gateway(situation: Situation, *, gate_open: bool) -> Finding:
    """At least one gateway serves."""
    return _available(situation, Component.GATEWAY, ConditionType.GATEWAY_AVAILABLE, gate_open=gate_open)


def workers(situation: Situation, *, gate_open: bool) -> Finding:
    """At least one of the wanted workers is up, or none is wanted."""
    deployment = situation.child(Component.WORKER)
    if deployment is not None and wanted(deployment) == 0:
        return Finding(Status.TRUE, Reason.SCALED_TO_ZERO, "no worker is needed now")
    return _available(situation, Component.WORKER, ConditionType.WORKERS_AVAILABLE, gate_open=gate_open)


def scaling(situation: Situation) -> Finding:
    """Whether the number of workers follows the demand."""
    fact, manifest = situation.observed.scaling, situation.observed.manifest
    if manifest is not None and manifest.spec.scaling.mode == "External":
        return Finding(Status.FALSE, Reason.EXTERNAL, "spec.scaling.mode is External: the number of workers is set by others")
    if manifest is not None and manifest.spec.suspend:
        return Finding(Status.FALSE, Reason.SUSPENDED, "suspended AgentRuns have no workers")
    if fact is None:
        return Finding(Status.UNKNOWN, Reason.PENDING, "the demand has not been measured yet")
    return _SCALING[fact.state]


_SCALING: Mapping[ScalingState, Finding] = {
    ScalingState.ACTIVE: Finding(Status.TRUE, Reason.DEMAND_KNOWN, "the number of workers follows the demand"),
    ScalingState.UNKNOWN_DEMAND: Finding(
        Status.UNKNOWN, Reason.DEMAND_UNKNOWN, "the demand cannot be measured; the number of workers is held; see QueueReady"
    ),
    ScalingState.EXTERNAL: Finding(
        Status.FALSE, Reason.EXTERNAL, "spec.scaling.mode is External: the number of workers is set by others"
    ),
    ScalingState.FOREIGN_SCALER: Finding(
        Status.FALSE,
        Reason.FOREIGN_SCALER,
        "an autoscaler is set on the worker Deployment and has it alone; remove it, or set spec.scaling.mode to External",
    ),
}


def summary(situation: Situation, findings: Mapping[ConditionType, Finding], *, changing: frozenset[Component]) -> Finding:
    """Ready. `changing` are the Deployments that this reconcile changes or makes."""
    failed = _roll_out_failed(situation, changing)
    for kind in _SUMMED:
        finding = findings[kind]
        if failed is not None and kind is ConditionType.GATEWAY_AVAILABLE:
            return failed
        if finding.true or (kind is ConditionType.WORKERS_AVAILABLE and _wakes(situation, finding)):
            continue
        if kind is ConditionType.SCHEMA_READY and finding.reason is Reason.NOT_EVALUATED:
            continue  # what it waits for says more
        return Finding(finding.status, finding.reason, finding.message)
    if (rolling := _rolling_out(situation, changing)) is not None:
        return rolling
    if situation.manifest.spec.suspend:
        return Finding(Status.FALSE, Reason.SUSPENDED, "spec.suspend is set; set it to false to take messages again")
    return Finding(Status.TRUE, Reason.READY, "messages are taken and worked on")


_SUMMED = (
    ConditionType.ACCEPTED,
    ConditionType.SCHEMA_READY,
    ConditionType.QUEUE_READY,
    ConditionType.GATEWAY_AVAILABLE,
    ConditionType.WORKERS_AVAILABLE,
)


def _wakes(situation: Situation, finding: Finding) -> bool:
    return finding.status is Status.UNKNOWN and finding.reason is Reason.STARTING and situation.was_ready()


def _available(situation: Situation, component: Component, kind: ConditionType, *, gate_open: bool) -> Finding:
    deployment = situation.child(component)
    name = f"the {component}"
    if deployment is None and not gate_open:
        return Finding(
            Status.UNKNOWN, Reason.NOT_EVALUATED, f"{name} is not made before Accepted, SchemaReady and QueueReady allow it"
        )
    trouble = situation.observed.troubles.get(component)
    if deployment is not None and count(deployment, "availableReplicas") > 0:
        but = f", but not all of its pods: {trouble}" if trouble else ""
        return Finding(Status.TRUE, Reason.AVAILABLE, f"{name} is up{but}", again=_look(situation) if trouble else None)
    old = situation.old_condition(kind)
    because = f": {trouble}" if trouble else ""
    advice = f"kubectl describe pods -n {situation.observed.key.namespace} -l agentrun.dev/agentrun={situation.observed.key.name}"
    failed = Finding(Status.FALSE, Reason.UNAVAILABLE, f"no pod of {name} is ready{because}; {advice}", again=_look(situation))
    if old is not None and old.get("status") == Status.FALSE and deployment is not None:
        return failed
    if component is Component.GATEWAY and old is not None and old.get("status") == Status.TRUE:
        return failed
    left = STARTING_SECONDS
    if old is not None and old.get("reason") == Reason.STARTING and deployment is not None:
        # Its status was Unknown before, too: for as long as something else stood in the way of making the Deployment.
        left -= min(seconds_since(old, situation.now), age(deployment, situation.now))
    if left <= 0:
        return failed
    message = f"{name} does not start{because}; {advice}" if trouble else f"{name} starts; if it takes long: {advice}"
    return Finding(
        Status.UNKNOWN, Reason.STARTING, message, again=min(left + 1.0, again_after(situation.observed.troubled_seconds))
    )


def _rolling_out(situation: Situation, changing: frozenset[Component]) -> Finding | None:
    """Whether pods of the former kind remain, or the new ones are not there yet."""
    for component in SERVING:
        deployment = situation.child(component)
        settled = deployment is not None and component not in changing and _settled(situation, component, deployment)
        if not settled:
            where, trouble = situation.observed.key, situation.observed.troubles.get(component)
            return Finding(
                Status.FALSE,
                Reason.ROLLING_OUT,
                f"pods of the {component} are being replaced{f', and the new ones do not start: {trouble}' if trouble else ''}; "
                f"kubectl get pods -n {where.namespace} -l agentrun.dev/agentrun={where.name}",
                again=_look(situation),
            )
    scheduler = situation.child(Component.SCHEDULER)
    if scheduler is not None and count(scheduler, "availableReplicas") == 0:
        where, trouble = situation.observed.key, situation.observed.troubles.get(Component.SCHEDULER)
        return Finding(
            Status.FALSE,
            Reason.SCHEDULER_UNAVAILABLE,
            f"no pod of the scheduler is ready{f': {trouble}' if trouble else ''}; "
            f"kubectl describe pods -n {where.namespace} -l agentrun.dev/agentrun={where.name}",
            again=_look(situation),
        )
    return None


def _look(situation: Situation) -> float | None:
    """When to look at the pods again."""
    observed = situation.observed
    return again_after(observed.troubled_seconds) if may_be_in_trouble(observed.children) else None


def _roll_out_failed(situation: Situation, changing: frozenset[Component]) -> Finding | None:
    """The controller of Deployments has given up waiting for pods of the present template."""
    for component in SERVING:
        deployment = situation.child(component)
        if deployment is None or component in changing:
            continue
        progress = find((deployment.get("status") or {}).get("conditions") or (), "Progressing")
        if progress is None or progress.get("status") != Status.FALSE or progress.get("reason") != _GAVE_UP:
            continue
        if is_observed(deployment) or situation.was(ConditionType.READY, Reason.ROLL_OUT_FAILED):
            said = situation.observed.troubles.get(component) or str(progress.get("message") or _GAVE_UP).rstrip(".")
            where = situation.observed.key
            labels = ",".join(f"{name}={value}" for name, value in selector(where.name, component).items())
            message = (
                f"the new pods of the {component} do not come up ({said}): see kubectl describe pods -n {where.namespace} -l {labels}; "
                "correct what keeps them from it, or go back to the former spec"
            )
            return Finding(Status.FALSE, Reason.ROLL_OUT_FAILED, message, again=_look(situation))
    return None


_GAVE_UP = "ProgressDeadlineExceeded"


def _settled(situation: Situation, component: Component, deployment: Object) -> bool:
    """The controller of Deployments has seen the present template, and only pods of it are left."""
    if not is_observed(deployment):
        return situation.was_ready()  # a moment; the scaler's changes are not to be seen as roll-outs
    pods, updated = count(deployment, "replicas"), count(deployment, "updatedReplicas")
    # While workers are added some of them are not made yet.
    return pods <= updated and (component is Component.WORKER or updated >= wanted(deployment))


def is_observed(deployment: Object) -> bool:
    """Whether its status is of its present spec."""
    return count(deployment, "observedGeneration") >= int(deployment["metadata"].get("generation", 0))


def is_rolled_out(deployment: Object) -> bool:
    """Whether no pod of a former template is left."""
    return is_observed(deployment) and count(deployment, "replicas") <= count(deployment, "updatedReplicas")


def wanted(deployment: Object) -> int:
    """spec.replicas."""
    return int(deployment["spec"].get("replicas", 1))


def count(deployment: Object, member: str) -> int:
    """A number in the status of a Deployment."""
    return int((deployment.get("status") or {}).get(member) or 0)


def up_to_date(live: Object, desired: Object) -> bool:
    """Whether an object was made from the same wishes."""
    return _noted(live, DESIRED_DIGEST) == _noted(desired, DESIRED_DIGEST)


def same_pods(deployment: Object, desired: Object) -> bool:
    """Whether the pods of a Deployment were."""
    return _noted(deployment, TEMPLATE_DIGEST) == _noted(desired, TEMPLATE_DIGEST)


def _noted(body: Object, name: str) -> str | None:
    return (body["metadata"].get("annotations") or {}).get(name)
