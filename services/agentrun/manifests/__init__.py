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
from agentrun.manifests.crontask import AgentRunRef, CatchUpSpec, CronTask, CronTaskMetadata, CronTaskSpec, SessionSpec
from agentrun.manifests.execution import (
    FollowUpsSpec,
    ReaperSpec,
    ScalingSpec,
    SchedulerSpec,
    StreamingSpec,
    SubmissionSpec,
    WorkersSpec,
)
from agentrun.manifests.loading import Manifests, agent_run_of, cron_task_of, load, load_all, load_one, parse, parse_all
from agentrun.manifests.money import BudgetSpec, PriceSpec
from agentrun.manifests.pods import NetworkPolicy, PodTemplate, Resources, Service

__all__ = [
    "API_VERSION",
    "AgentRun",
    "AgentRunRef",
    "AgentRunSpec",
    "AgentSpec",
    "AuthSpec",
    "BudgetSpec",
    "CatchUpSpec",
    "CronTask",
    "CronTaskMetadata",
    "CronTaskSpec",
    "DatabaseSpec",
    "FollowUpsSpec",
    "GatewaySpec",
    "KeysSecretRef",
    "Manifests",
    "Metadata",
    "NamedRef",
    "NetworkPolicy",
    "PodTemplate",
    "PriceSpec",
    "ReaperSpec",
    "RedisSpec",
    "Resources",
    "ScalingSpec",
    "SchedulerSpec",
    "SecretRef",
    "Service",
    "SessionSpec",
    "StoreSecrets",
    "StreamingSpec",
    "SubmissionSpec",
    "WorkersSpec",
    "agent_run_of",
    "cron_task_of",
    "load",
    "load_all",
    "load_one",
    "parse",
    "parse_all",
]
