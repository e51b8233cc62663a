"""Bugs that are planted in a copy of the product, one at a time, each with a test that must go red.

They are the rules of the protocol taken away one by one (H1 to H13 of its model, tests/unit/model), and mistakes that are easily made.
Left out is what the model has shown to be harmless: an entry that is acknowledged before the claim or the finish commits.
"""

from dataclasses import dataclass

TRANSITIONS, SUBMISSIONS, MONEY = "store/transitions.sql", "store/submissions.sql", "store/money.sql"


@dataclass(frozen=True)
class Patch:
    """In `file`, below services/agentrun, `old` becomes `new`; it must be there `times`, 0 for any number from 1 on."""

    file: str
    old: str
    new: str
    times: int = 1


@dataclass(frozen=True)
class Bug:
    """`test` goes red with it. `quick`: it takes so little time that every `make test-slow` plants it."""

    name: str
    what: str
    test: str
    patches: tuple[Patch, ...]
    quick: bool = False


def _bug(name: str, what: str, test: str, *patches: tuple[str, str, str], quick: bool = False) -> Bug:
    return Bug(name, what, test, tuple(Patch(*patch) for patch in patches), quick)


BUGS: tuple[Bug, ...] = (
    _bug(
        "h1-no-scan",
        "the reaper looks at entries only, not for leases that are over",
        "tests/stores/test_maintenance_reaper.py::test_a_running_run_is_recovered_after_redis_lost_everything",
        ("maintenance/reaper.py", "        contact, failed = self._lease_contact, set[AttemptRef]()\n", "        return\n"),
    ),
    Bug(
        "h2-for-update",
        "row locks are FOR UPDATE, against which foreign-key checks deadlock",
        "tests/stores/test_transitions.py::test_a_write_that_checks_a_foreign_key_waits_for_no_transition",
        (Patch(TRANSITIONS, "FOR NO KEY UPDATE", "FOR UPDATE", 0), Patch(SUBMISSIONS, "FOR NO KEY UPDATE", "FOR UPDATE", 0)),
    ),
    _bug(
        "h2-finish-locks-no-run",
        "finish locks its attempt before its run",
        "tests/stores/test_transitions.py::test_whoever_ends_a_run_locks_session_run_and_attempt_in_this_order",
        (
            TRANSITIONS,
            "    PERFORM 1 FROM runs WHERE id = ANY (p_run) ORDER BY id FOR NO KEY UPDATE;\n    IF p_ledger IS NOT NULL THEN\n",
            "    IF p_ledger IS NOT NULL THEN\n",
        ),
    ),
    _bug(
        "h3-effects-before-the-lock",
        "the merge looks for effects before it holds the attempt",
        "tests/stores/test_follow_ups.py::test_effect_and_merge_at_once_never_both_win",
        (
            SUBMISSIONS,
            "            PERFORM 1 FROM attempts a WHERE a.run_id = v_last.id AND a.epoch = v_last.epoch FOR NO KEY UPDATE;\n",
            "",
        ),
    ),
    _bug(
        "h4-merge-the-head",
        "a message is merged with the session's head, not with its last unfinished run",
        "tests/stores/test_follow_ups.py::test_the_last_unfinished_run_is_merged_not_the_head",
        (
            SUBMISSIONS,
            "AND r.id <> p_run AND r.status IN ('pending', 'running')\n            ORDER BY r.session_position DESC LIMIT 1;",
            "AND r.id <> p_run AND r.status IN ('pending', 'running')\n            ORDER BY r.session_position LIMIT 1;",
        ),
    ),
    _bug(
        "h5-policy-before-the-key",
        "Reject is applied before the insert has said whether the message is a replay",
        "tests/stores/test_follow_ups.py::test_a_lost_reply_is_found_again",
        (
            SUBMISSIONS,
            "    GET DIAGNOSTICS v_made = ROW_COUNT;\n\n    IF v_made = 0 THEN\n        DELETE FROM sessions s WHERE s.id = p_session",
            "    v_made := 1;\n\n    IF v_made = 0 THEN\n        DELETE FROM sessions s WHERE s.id = p_session",
        ),
    ),
    _bug(
        "h6-no-lease-check",
        "take_over by the reaper does not compare the lease in its UPDATE",
        "tests/stores/test_transitions.py::test_the_reaper_takes_only_a_run_whose_lease_is_over",
        (TRANSITIONS, "(p_reason <> 'lost' OR (a.lease_expires_at < now() AND", "(p_reason <> 'lost' OR (true AND"),
        quick=True,
    ),
    _bug(
        "h7-reaper-without-contact",
        "a reaper takes over as soon as it reaches Postgres again",
        "tests/stores/test_maintenance_reaper.py::test_after_a_restart_of_postgres_the_living_get_one_lease_to_renew",
        ("control/contact.py", "self._last - self._since >= self._lease", "True"),
    ),
    _bug(
        "h7-late-take-over",
        "a take-over that was under way through a stall is not refused",
        "tests/stores/test_maintenance_stalls.py::test_a_stall_between_the_reapers_contact_and_its_act_ends_no_living_attempt",
        (TRANSITIONS, "AND now() <= coalesce(p_until, 'infinity')", ""),
    ),
    _bug(
        "h7-no-pause",
        "an attempt past its own deadline goes on as if nothing were",
        "tests/stores/test_worker_faults.py::test_postgres_away_for_longer_than_a_lease_pauses_the_attempt_which_then_goes_on",
        ("worker/lease.py", "return time.monotonic() >= self.deadline", "return False"),
    ),
    _bug(
        "h8-cursor-up-to-the-top",
        "a cursor above what is stored is refused, though its number was given out",
        "tests/stores/test_gateway_streams.py::test_se_07_a_position_within_the_reserved_numbers_of_a_running_run_is_honest",
        ("store/messages.py", "else max(self.top, self.seq_reserved)", "else self.top"),
    ),
    _bug(
        "h9-gap-in-one-piece",
        "a restart does not take back the part of a gap that came after the checkpoint",
        "tests/stores/test_gateway_gap.py::test_a_restart_takes_back_the_part_after_the_checkpoint",
        ("domain/reducer.py", "        self.before = [part for part in self.before if part[0] <= top]\n", ""),
    ),
    _bug(
        "h9-gap-without-the-checkpoint",
        "the gateway sends a gap in one part, of which a restart cannot take back what came after the checkpoint",
        "tests/stores/test_gateway_gap.py::test_a_restart_takes_back_the_part_after_the_checkpoint",
        ("gateway/log.py", "fold(marks, checkpoint=checkpoint)", "fold(marks, checkpoint=-1)"),
        quick=True,
    ),
    _bug(
        "h10-checkpoint-not-copied",
        "the claim does not copy the previous attempt's checkpoint",
        "tests/stores/test_transitions.py::test_an_attempt_that_dies_at_once_passes_the_earlier_checkpoint_on",
        (TRANSITIONS, "           a.checkpoint, coalesce(a.checkpoint_seq, -1), coalesce", "           NULL, -1, coalesce"),
    ),
    _bug(
        "h10-checkpoint-without-its-seq",
        "the claim copies the checkpoint and not where it stands",
        "tests/stores/test_transitions.py::test_an_attempt_that_dies_at_once_passes_the_earlier_checkpoint_on",
        (
            TRANSITIONS,
            "           a.checkpoint, coalesce(a.checkpoint_seq, -1), coalesce",
            "           a.checkpoint, -1, coalesce",
        ),
    ),
    _bug(
        "h11-claim-without-epoch",
        "the claim does not name the epoch that was seen",
        "tests/stores/test_transitions.py::test_a_late_claim_at_an_old_epoch_takes_nothing",
        (TRANSITIONS, "WHERE r.status = 'pending' AND r.epoch = n.seen AND", "WHERE r.status = 'pending' AND"),
        quick=True,
    ),
    _bug(
        "h11-claim-before-due",
        "a run is claimed before its time",
        "tests/stores/test_transitions.py::test_only_the_head_that_is_due_can_be_claimed",
        (TRANSITIONS, "r.epoch = n.seen AND (r.not_before IS NULL OR r.not_before <= now())", "r.epoch = n.seen"),
    ),
    _bug(
        "h12-reservation-goes-down",
        "a late flush lowers seq_reserved",
        "tests/stores/test_transitions.py::test_a_late_flush_lowers_neither_the_reservation_nor_the_checkpoint",
        (TRANSITIONS, "seq_reserved = greatest(a.seq_reserved, n.reserve)", "seq_reserved = n.reserve"),
    ),
    _bug(
        "h13-any-eviction-policy",
        "a Redis that may drop keys is used",
        "tests/stores/test_bus_runs.py::test_rs_24_a_server_that_may_evict_keys_is_refused",
        ("bus/connection.py", 'if policy != "noeviction":', "if not policy:"),
    ),
    _bug(
        "h13-stale-hash",
        "the sweep believes the hash though the stream has lost the entry: the same as a note in Postgres that a run was published",
        "tests/stores/test_maintenance_sweep.py::test_an_old_entry_that_is_gone_is_replaced",
        (
            "maintenance/sweep.py",
            "gone = set(old) - await self._stream.existing(list(old)) if old else set()",
            "gone: set[str] = set()",
        ),
    ),
    _bug(
        "202-before-the-commit",
        "a message is accepted before it is stored",
        "tests/stores/test_gateway_outages.py::test_postgres_away_is_503_with_a_time_to_retry_and_mends_itself",
        (
            "gateway/submissions.py",
            "        async with answering():\n            decided = await self._group.submit(submission)\n",
            "        early = asyncio.create_task(self._group.submit(submission))\n"
            "        if early is not None:\n"
            "            session = submission.session_id\n"
            "            return Accepted(submission.run_id, session, submission.external_id, RunStatus.PENDING, False)\n"
            "        async with answering():\n            decided = await self._group.submit(submission)\n",
        ),
    ),
    _bug(
        "fencing-as-a-check",
        "a flush looks whether its attempt runs, and then writes",
        "tests/stores/test_transitions.py::test_a_flush_waits_for_whoever_ends_its_attempt",
        (
            TRANSITIONS,
            """        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    ), fenced AS (
        UPDATE attempts a SET seq_reserved""",
            """        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch
    ), fenced AS (
        UPDATE attempts a SET seq_reserved""",
        ),
        (
            TRANSITIONS,
            "WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch\n"
            "    ), stored AS (\n        INSERT INTO messages (run_id, seq, epoch, kind, data)\n"
            "        SELECT e.run_id, e.seq, e.epoch, e.kind, e.data::json\n"
            "        FROM unnest(e_run, e_epoch, e_seq, e_kind, e_data) AS e (run_id, epoch, seq, kind, data)\n"
            "        JOIN fenced f ON f.run_id = e.run_id AND f.epoch = e.epoch\n"
            "        ORDER BY e.run_id, e.seq ON CONFLICT DO NOTHING\n    )\n    SELECT fenced",
            "WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch RETURNING a.run_id, a.epoch\n"
            "    ), stored AS (\n        INSERT INTO messages (run_id, seq, epoch, kind, data)\n"
            "        SELECT e.run_id, e.seq, e.epoch, e.kind, e.data::json\n"
            "        FROM unnest(e_run, e_epoch, e_seq, e_kind, e_data) AS e (run_id, epoch, seq, kind, data)\n"
            "        JOIN fenced f ON f.run_id = e.run_id AND f.epoch = e.epoch\n"
            "        ORDER BY e.run_id, e.seq ON CONFLICT DO NOTHING\n    )\n    SELECT fenced",
        ),
    ),
    _bug(
        "lost-reply-means-fenced",
        "a claim that changed nothing is not read back by its owner",
        "tests/stores/test_transitions.py::test_a_claim_asked_again_by_its_owner_is_read_back",
        (
            TRANSITIONS,
            "AND a.owner = n.owner AND a.outcome = 'running'\n",
            "AND a.owner = n.owner AND a.outcome = 'running' AND a.started_at = now()\n",
        ),
        quick=True,
    ),
    _bug(
        "hash-never-cleared",
        "an acknowledged entry stays known",
        "tests/stores/test_bus_runs.py::test_an_acknowledged_run_can_be_published_again",
        ("bus/acknowledge.lua", "    redis.call('HDEL', KEYS[2], run)\n", ""),
    ),
    _bug(
        "terminal-before-the-commit",
        "readers are told the end before it is stored",
        "tests/stores/test_worker_faults.py::test_an_event_is_out_before_it_is_stored_and_the_end_only_after_it",
        (
            "worker/endings.py",
            '            await failpoints.hit("worker.finish.before")\n',
            '            self._writer.live.put(self._claimed.run_id, (last,))\n            await failpoints.hit("worker.finish.before")\n',
        ),
    ),
    _bug(
        "reservation-not-durable",
        "numbers go out that no commit has reserved",
        "tests/stores/test_worker_faults.py::test_no_number_is_out_that_no_commit_has_reserved",
        ("worker/run_log.py", "return self._next <= self._reserved and", "return"),
        quick=True,
    ),
    _bug(
        "budget-not-reserved",
        "what a run may cost is compared with the day's limit and not set aside, so that runs pass it together",
        "tests/stores/test_money_budgets.py::test_groups_at_once_admit_exactly_what_fits",
        (MONEY, "SET reserved = c.reserved + s.runs * v_each", "SET reserved = c.reserved"),
        quick=True,
    ),
    Bug(
        "budget-reserved-nowhere",
        "a run's reserve is in the day's counters and not in its row, so that its end gives nothing back",
        "tests/stores/test_money_budgets.py::test_a_booking_moves_money_from_reserved_to_spent_and_an_end_gives_back_the_rest",
        (Patch(SUBMISSIONS, "(p_budget ->> 'run')::numeric, agentrun_1.budget_day(p_budget)", "NULL, NULL", 2),),
    ),
    _bug(
        "no-voids",
        "numbers that were reserved and never stored are given out again",
        "tests/stores/test_transitions.py::test_what_was_reserved_and_never_stored_becomes_void_then_restart",
        (TRANSITIONS, "        v_next := greatest(v_next, v_attempt.seq_reserved + 1);\n", ""),
        (TRANSITIONS, "FROM generate_series(v_next, v_attempt.seq_reserved) AS s;", "FROM generate_series(1, 0) AS s;"),
    ),
    _bug(
        "no-comparison-at-heartbeats",
        "the gateway does not compare with the top in Postgres at heartbeats, so a lost last event is never found",
        "tests/stores/test_gateway_streams.py::test_se_05_an_end_that_only_postgres_knows_is_found_with_the_next_heartbeat",
        (
            "gateway/feeds.py",
            "beat, due = time.monotonic() + self._heartbeat_seconds, True",
            "beat = time.monotonic() + self._heartbeat_seconds",
        ),
    ),
    _bug(
        "no-comparison-after-reconnects",
        "the gateway does not compare with the top in Postgres after Redis was away",
        "tests/stores/test_gateway_outages.py::test_streams_go_on_from_postgres_while_redis_is_away_and_from_redis_when_it_is_back",
        ("gateway/feeds.py", "if not self._live.connected or time.monotonic() < self._settled_at:", "if False:"),
        ("gateway/feeds.py", "due = self._soon.is_set() or self._uncertain()", "due = self._uncertain()"),
    ),
    _bug(
        "one-member-aborts-the-script",
        "one event that Redis refuses stops the others of its script",
        "tests/stores/test_bus_events.py::test_one_refused_member_does_not_stop_the_others",
        ("bus/append.lua", "redis.pcall('XADD'", "redis.call('XADD'"),
        quick=True,
    ),
    _bug(
        "autoclaim-counts",
        "XAUTOCLAIM raises the delivery counter of what it only looks at",
        "tests/stores/test_bus_runs.py::test_refreshing_resets_idle_time_and_keeps_the_delivery_count",
        ("bus/autoclaim.lua", ", ARGV[5], 'JUSTID')", ", ARGV[5])"),
        (
            "bus/autoclaim.lua",
            "for _, entry in ipairs(claimed[2]) do\n",
            "for _, whole in ipairs(claimed[2]) do\n  local entry = whole[1]\n",
        ),
    ),
)


def table() -> str:
    """The bugs and their tests, for the documentation."""
    rows = [f"| `{bug.name}` | {bug.what} | `{bug.test.removeprefix('tests/').partition('::')[0]}` |" for bug in BUGS]
    return "\n".join(["| bug | what it is | goes red |", "|---|---|---|", *rows])


if __name__ == "__main__":
    print(table())
