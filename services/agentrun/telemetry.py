"""Logs and metrics: how they are set up, and the closed list of metrics. Nobody else makes a metric object."""

import logging
import sys
from typing import Any, Literal, TextIO

import structlog
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, PlatformCollector, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest

REGISTRY = CollectorRegistry()
ProcessCollector(registry=REGISTRY)
PlatformCollector(registry=REGISTRY)


def _counter(name: str, what: str, *labels: str) -> Counter:
    return Counter(name, what, labels, registry=REGISTRY)


FENCED_WRITES = _counter(
    "agentrun_fenced_writes_total", "Writes of an attempt that changed nothing because the attempt had been ended."
)
RUNS_SUBMITTED = _counter(
    "agentrun_runs_submitted_total", "Submissions answered; replayed: the run was there already.", "replayed"
)
RUNS_FINISHED = _counter("agentrun_runs_finished_total", "Runs that reached a final status here.", "status")
ATTEMPTS_ENDED = _counter("agentrun_attempts_ended_total", "Attempts ended here, by outcome.", "outcome")
ENTRIES = _counter(
    "agentrun_entries_total",
    "Stream entries by what was done with them: orphan, claim, ack, republish, give_back, leave, take_over, deleted.",
    "action",
)
TAKEOVERS = _counter("agentrun_takeovers_total", "Runs taken from an attempt, by reason.", "reason")
SWEEP_PUBLISHED = _counter("agentrun_sweep_published_total", "Waiting runs without a stream entry that the sweep published.")
STREAM_REFILLS = _counter(
    "agentrun_stream_refills_total",
    "Holes in a live stream that were refilled, by source: redis or postgres.",
    "source",
)
STREAM_CLIENTS = Gauge("agentrun_stream_clients", "Clients that follow a run right now.", registry=REGISTRY)
GROUP_SIZE = Histogram(
    "agentrun_group_size",
    "Members of one group commit, by stage.",
    ["stage"],
    buckets=(1, 2, 5, 10, 20, 50, 100, 200, 500),
    registry=REGISTRY,
)
EVENTS = _counter("agentrun_events_total", "Events of runs sent out by this worker.")
LOOP_RESTARTS = _counter("agentrun_loop_restarts_total", "Supervised loops that failed and were started again.", "loop")
ENTRY_ERRORS = _counter(
    "agentrun_entry_errors_total", "Runs or entries that maintenance could not handle this time, by loop.", "loop"
)
DEAD_LETTERS = _counter(
    "agentrun_dead_letters_total", "Runs put aside for a person: too many attempts were lost, or an effect's outcome is unknown."
)
CONSUMERS_RETIRED = _counter("agentrun_consumers_retired_total", "Idle consumers with nothing pending that were removed.")
RETENTION = _counter(
    "agentrun_retention_total", "Rows that retention removed: events, runs, slots, ledger; and runs archived.", "what"
)
SLOTS = _counter("agentrun_slots_total", "Slots of CronTasks that were decided here, by outcome.", "outcome")
SLOTS_FORGOTTEN = _counter(
    "agentrun_slots_forgotten_total",
    "Missed slots of CronTasks that were older than those that are remembered, and so have no outcome; at most 10000 of each look.",
)
SLOT_DELAY = Histogram(
    "agentrun_slot_delay_seconds",
    "From a slot's time until its run was stored; waits by jitterSeconds come on top.",
    buckets=(0.5, 1, 2, 5, 10, 30, 60, 300, 3600),
    registry=REGISTRY,
)
SLOTS_WITHOUT_SUCCESS = Gauge(
    "agentrun_cron_slots_without_success",
    "Slots of a CronTask since its newest success ended, at most 20; each scheduler says the same.",
    ["task"],
    registry=REGISTRY,
)
RUNS_ACTIVE = Gauge("agentrun_runs_active", "Runs that this worker executes right now.", registry=REGISTRY)
WORKER_CAPACITY = Gauge("agentrun_worker_capacity", "Runs that this worker may execute at the same time.", registry=REGISTRY)
LEASE_RENEWALS = _counter("agentrun_lease_renewals_total", "Lease renewals, by result: renewed, late, lost or failed.", "result")
MODEL_CALLS = _counter(
    "agentrun_model_calls_total", "Model calls booked here; unmeasured: cut before the usage came.", "unmeasured"
)
UNKNOWN_PRICES = _counter("agentrun_unknown_prices_total", "Model calls booked without a price.")
BUDGET_REFUSALS = _counter(
    "agentrun_budget_refusals_total",
    "Submissions and slots refused because of a day's budget, by scope: agent, user or slot.",
    "scope",
)
BUDGET_STOPS = _counter(
    "agentrun_budget_stops_total", "Runs stopped by their own limit, by type: budget_exceeded or price_unknown.", "type"
)
REQUEST_SECONDS = Histogram(
    "agentrun_request_seconds",
    "Time to the first byte of an answer, by route and status class.",
    ["route", "status"],
    buckets=(0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10),
    registry=REGISTRY,
)


def exposition() -> tuple[bytes, str]:
    """The metrics in the text format of Prometheus, and its content type."""
    return generate_latest(REGISTRY), CONTENT_TYPE_LATEST


def set_up_logs(*, level: str, form: Literal["json", "console"], out: TextIO | None = None, **bound: str) -> None:
    """Sends structlog and the standard library's loggers to `out` (stderr), one line each; `bound` is in every line."""
    stamps: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        _binder(bound),
    ]
    last: list[structlog.typing.Processor] = [structlog.stdlib.ProcessorFormatter.remove_processors_meta]
    if form == "json":
        last += [structlog.processors.format_exc_info, structlog.processors.JSONRenderer()]
    else:
        last.append(structlog.dev.ConsoleRenderer(colors=sys.stderr.isatty(), exception_formatter=structlog.dev.plain_traceback))
    handler = logging.StreamHandler(out or sys.stderr)
    handler.setFormatter(structlog.stdlib.ProcessorFormatter(foreign_pre_chain=stamps, processors=last))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    for chatty in ("httpx", "httpx2", "httpcore", "uvicorn.access", "openai"):
        logging.getLogger(chatty).setLevel(max(logging.WARNING, root.level))
    structlog.configure(
        processors=[structlog.stdlib.filter_by_level, *stamps, structlog.stdlib.ProcessorFormatter.wrap_for_formatter],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=True,
    )


def _binder(bound: dict[str, str]) -> structlog.typing.Processor:
    def bind(_logger: Any, _method: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
        for name, value in bound.items():
            event.setdefault(name, value)
        return event

    return bind
