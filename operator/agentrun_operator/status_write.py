"""Writes the status of an AgentRun or a CronTask, also where the API server has CRDs that are older than this operator."""

from collections.abc import Mapping
from typing import Any

import structlog

from agentrun_operator.kube import Kube
from agentrun_operator.kube_errors import Invalid
from agentrun_operator.reasons import ConditionType
from agentrun_operator.resources import Ref

MANAGER = "agentrun-status"
OLD_CRDS = "; the CRDs are older than this operator, so parts of the status are missing: apply the CRDs of the operator's version"

_log = structlog.get_logger(__name__)


async def write_status(kube: Kube, ref: Ref, uid: str, status: Mapping[str, Any]) -> dict[str, Any]:
    """The answer. With the uid, so that a successor of the same name does not get it. Raises KubeError, NotFound if it is gone.

    Members that the CRD does not have make the API server refuse all of it. Then the conditions are written alone, and say so.
    """
    body = {"metadata": {"uid": uid}, "status": dict(status)}
    try:
        return await kube.apply(ref, body, manager=MANAGER, subresource="status")
    except Invalid as error:
        _log.warning("a status was refused; apply the CRDs of this version", object=str(ref), error=str(error))
        return await kube.apply(ref, {**body, "status": _least(status)}, manager=MANAGER, subresource="status")


def _least(status: Mapping[str, Any]) -> dict[str, Any]:
    conditions = [
        {**one, "message": one["message"] + OLD_CRDS} if one["type"] == ConditionType.ACCEPTED else one
        for one in status["conditions"]
    ]
    return {"observedGeneration": status["observedGeneration"], "conditions": conditions}
