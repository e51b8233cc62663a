"""agentrun: LLM agents as durable runs on Postgres and Redis Streams."""

__version__ = "0.1.0"
