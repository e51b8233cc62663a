"""The migration Job. Its name has a fingerprint of what it depends on, so that a changed image or secret gives a new one."""

from collections.abc import Mapping
from typing import Any

from agentrun.manifests import AgentRun
from agentrun_operator.digests import digest
from agentrun_operator.render.labels import new_object
from agentrun_operator.render.names import Component, migration
from agentrun_operator.render.pods import Pod, pod_template, secret_env
from agentrun_operator.resources import JOBS, Key, Ref

RETRIES = 2
GRACE_SECONDS = 30


def fingerprint(template: Mapping[str, Any], *, required: int, secrets_digest: str) -> str:
    """Eight digits that change with the pods of the Job (image, spec.podTemplate), the schema that is needed, and the secrets."""
    return digest([template, required, secrets_digest], length=8)


def migration_template(key: Key, manifest: AgentRun, *, image: str) -> dict[str, Any]:
    """The pods of the Job: `agentrun migrate` with the stronger role if there is one."""
    pod = Pod(
        Component.MIGRATE,
        image,
        GRACE_SECONDS,
        container={"terminationMessagePolicy": "FallbackToLogsOnError"},  # so that the operator can say why it failed
        env=[secret_env("DATABASE_URL", manifest.spec.store_secrets().migration)],
        spec={"restartPolicy": "Never"},
    )
    return pod_template(key, manifest, pod=pod)


def migration_job(key: Key, *, uid: str, template: Mapping[str, Any], mark: str) -> dict[str, Any]:
    """The Job with a fingerprint."""
    ref = Ref(JOBS, key.namespace, migration(key, fingerprint=mark))
    body = new_object(ref, key.name, uid=uid, component=Component.MIGRATE)
    body["spec"] = {"backoffLimit": RETRIES, "completions": 1, "parallelism": 1, "template": template}
    return body
