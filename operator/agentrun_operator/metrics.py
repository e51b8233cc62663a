"""The operator's own metrics, in the registry that /metrics serves."""

from prometheus_client import Counter, Gauge, Histogram

from agentrun.telemetry import REGISTRY

LEADER = Gauge("agentrun_operator_leader", "1 while this replica holds the Lease.", registry=REGISTRY)
SYNCED = Gauge("agentrun_operator_synced", "1 after the first full list.", registry=REGISTRY)
KIND_MISSING = Gauge(
    "agentrun_operator_kind_missing",
    "1 while the API server does not serve this kind, and the operator goes on without it.",
    ["resource"],
    registry=REGISTRY,
)
API_REQUESTS = Counter(
    "agentrun_operator_api_requests_total",
    "Requests to the API server outside of watches, by verb and status; timeout, connection: no answer.",
    ["method", "status"],
    registry=REGISTRY,
)
WATCH_EVENTS = Counter(
    "agentrun_operator_watch_events_total",
    "Watch events by kind; changed: whether the cache learned something.",
    ["resource", "changed"],
    registry=REGISTRY,
)
QUEUE_LENGTH = Gauge("agentrun_operator_queue_length", "Keys that wait to be reconciled.", ["queue"], registry=REGISTRY)
RECONCILES = Counter(
    "agentrun_operator_reconciles_total", "Reconciles by result: done, failed, timeout.", ["queue", "result"], registry=REGISTRY
)
RECONCILE_SECONDS = Histogram(
    "agentrun_operator_reconcile_seconds",
    "Time of one reconcile.",
    ["queue"],
    buckets=(0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
RESYNC_SECONDS = Histogram(
    "agentrun_operator_resync_seconds",
    "Time of one full list of all kinds.",
    buckets=(0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60),
    registry=REGISTRY,
)
RESYNC_FOUND = Counter(
    "agentrun_operator_resync_found_total", "Objects' owners that a full list found changed without an event.", registry=REGISTRY
)
TICK_SECONDS = Histogram(
    "agentrun_operator_tick_seconds",
    "Time of one look at the queues of all AgentRuns of one Redis.",
    buckets=(0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)
SCALED = Counter(
    "agentrun_operator_scaled_total", "Changes of a number of workers, by direction: up, down.", ["direction"], registry=REGISTRY
)
SCALE_ERRORS = Counter(
    "agentrun_operator_scale_errors_total", "Changes of a number of workers that failed and are tried again.", registry=REGISTRY
)
REAPED = Counter(
    "agentrun_operator_reap_ticks_total",
    "Looks at stuck work of one AgentRun, by result: done, failed.",
    ["result"],
    registry=REGISTRY,
)
PROBES = Counter(
    "agentrun_operator_probes_total",
    "Looks at a store, by store and result: ok, problem.",
    ["store", "result"],
    registry=REGISTRY,
)
