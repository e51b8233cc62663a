"""Manifests: AgentRun and CronTask as typed values, and how they are read from a file or from an object of the API server."""

from agentrun.manifests.agentrun import (
    AgentRun,
    AgentRunSpec,
    AgentSpec,
    AuthSpec,
    DatabaseSpec,
    GatewaySpec,
    Metadata,
    RedisSpec,
    StoreSecrets,
)
from agentrun.manifests.base import API_VERSION, KeysSecretRef, NamedRef, SecretRef
from agentrun.manifests.crontask import AgentRunRef, CronTask, CronTaskMetadata, CronTaskSpec
from agentrun.manifests.execution import (
    FollowUpsSpec,
    ReaperSpec,
    ScalingSpec,
    StreamingSpec,
    SubmissionSpec,
    WorkersSpec,
)
from agentrun.manifests.loading import agent_run_of, cron_task_of, load, load_one, parse
from agentrun.manifests.pods import NetworkPolicy, PodTemplate, Resources, Service

__all__ = [
    "API_VERSION",
    "AgentRun",
    "AgentRunRef",
    "AgentRunSpec",
    "AgentSpec",
    "AuthSpec",
    "CronTask",
    "CronTaskMetadata",
    "CronTaskSpec",
    "DatabaseSpec",
    "FollowUpsSpec",
    "GatewaySpec",
    "KeysSecretRef",
    "Metadata",
    "NamedRef",
    "NetworkPolicy",
    "PodTemplate",
    "ReaperSpec",
    "RedisSpec",
    "Resources",
    "ScalingSpec",
    "SecretRef",
    "Service",
    "StoreSecrets",
    "StreamingSpec",
    "SubmissionSpec",
    "WorkersSpec",
    "agent_run_of",
    "cron_task_of",
    "load",
    "load_one",
    "parse",
]
