"""Manifests: the AgentRun as typed values, and how it is read from a file."""

from agentrun.manifests.agentrun import (
    AgentRun,
    AgentRunSpec,
    AgentSpec,
    DatabaseSpec,
    FollowUpsSpec,
    GatewaySpec,
    Metadata,
    ReaperSpec,
    RedisSpec,
    ScalingSpec,
    StreamingSpec,
    SubmissionSpec,
    WorkersSpec,
)
from agentrun.manifests.loading import load, load_one, parse

__all__ = [
    "AgentRun",
    "AgentRunSpec",
    "AgentSpec",
    "DatabaseSpec",
    "FollowUpsSpec",
    "GatewaySpec",
    "Metadata",
    "ReaperSpec",
    "RedisSpec",
    "ScalingSpec",
    "StreamingSpec",
    "SubmissionSpec",
    "WorkersSpec",
    "load",
    "load_one",
    "parse",
]
