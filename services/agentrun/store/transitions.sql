-- The only statements that move a run. Each group is one call of a VOLATILE function: every statement in it sees what was committed
-- before *that statement*, in one round trip and one transaction.
--
-- Row locks are FOR NO KEY UPDATE (foreign-key checks hold KEY SHARE, against which FOR UPDATE deadlocks), taken in one order:
-- new ledger rows by key, all sessions by id, all runs by id, all attempts by (run_id, epoch), ledger rows that change, counters of
-- budgets by (scope, day) and once. Flush, checkpoint and renewal lock attempts alone; the claim locks runs, and of a run that was tried
-- before its last attempt. `UPDATE … FROM unnest` locks in no order, so each multi-row UPDATE joins a CTE that has locked its rows in order.
--
-- Fencing: every write of an attempt is in one statement with an UPDATE of its attempts row that says outcome = 'running'. That is a
-- row lock, not a check: whoever ends the attempt waits, or is waited for.

-- Submissions are in submissions.sql, effects in effects.sql, money in money.sql, redrives in dead_letters.sql; the files are applied as one.

CREATE SCHEMA IF NOT EXISTS agentrun_1;

-- claim: pending, at the epoch that was seen, due and head -> running at epoch + 1, with a lease, a copy of the checkpoint and the
-- next numbers. The answer is read back by owner, so that a lost reply is found again.
CREATE OR REPLACE FUNCTION agentrun_1.claim(
    p_run uuid[], p_seen integer[], p_owner text[], p_lease double precision, p_reserve integer)
RETURNS TABLE (run_id uuid, epoch integer, owner text, agent text, user_id text, session_id uuid, session_position bigint,
               seq_reserved integer, top integer, checkpoint jsonb, checkpoint_seq integer, retries integer)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[];
    v_epochs integer[];
    v_owners text[];
BEGIN
    WITH n AS (
        SELECT * FROM unnest(p_run, p_seen, p_owner) AS t (id, seen, owner)
    ), locked AS (
        SELECT r.id, n.owner FROM runs r JOIN n ON n.id = r.id
        WHERE r.status = 'pending' AND r.epoch = n.seen AND (r.not_before IS NULL OR r.not_before <= now())
          AND NOT EXISTS (SELECT 1 FROM runs b WHERE b.session_id = r.session_id AND b.session_position < r.session_position
                          AND b.status IN ('pending', 'running'))
        ORDER BY r.id FOR NO KEY UPDATE OF r
    ), moved AS (
        UPDATE runs r SET status = 'running', epoch = r.epoch + 1, started_at = coalesce(r.started_at, now()), not_before = NULL
        FROM locked WHERE r.id = locked.id RETURNING r.id, r.epoch, locked.owner
    )
    SELECT array_agg(id), array_agg(epoch), array_agg(owner) INTO v_ids, v_epochs, v_owners FROM moved;

    -- a call of the attempt before may be booked just now: booked_usd is copied in a statement after the one that holds that attempt
    IF 1 < ANY (v_epochs) THEN
        PERFORM 1 FROM attempts a JOIN unnest(v_ids, v_epochs) AS m (id, epoch) ON a.run_id = m.id AND a.epoch = m.epoch - 1
            ORDER BY a.run_id FOR NO KEY UPDATE OF a;
    END IF;

    INSERT INTO attempts (run_id, epoch, owner, lease_expires_at, seq_reserved, checkpoint, checkpoint_seq, booked_usd)
    SELECT m.id, m.epoch, m.owner, now() + make_interval(secs => p_lease),
           coalesce((SELECT max(seq) FROM messages x WHERE x.run_id = m.id), -1) + p_reserve,
           a.checkpoint, coalesce(a.checkpoint_seq, -1), coalesce(a.booked_usd, 0)
    FROM unnest(v_ids, v_epochs, v_owners) AS m (id, epoch, owner)
    LEFT JOIN attempts a ON a.run_id = m.id AND a.epoch = m.epoch - 1;

    RETURN QUERY
    SELECT r.id, a.epoch, a.owner, r.agent, r.user_id, r.session_id, r.session_position, a.seq_reserved,
           coalesce((SELECT max(seq) FROM messages x WHERE x.run_id = r.id), -1), a.checkpoint, a.checkpoint_seq,
           (SELECT count(*) FROM attempts b WHERE b.run_id = r.id AND b.outcome = 'retrying')::integer
    FROM unnest(p_run, p_seen, p_owner) AS n (id, seen, owner)
    JOIN attempts a ON a.run_id = n.id AND a.epoch = n.seen + 1 AND a.owner = n.owner AND a.outcome = 'running'
    JOIN runs r ON r.id = a.run_id;
END $$;

-- renew: a renewal may come late; it succeeds as long as nobody took the run. A row that somebody holds is passed over, so that one
-- slow transaction does not cost a worker all its leases: neither renewed nor lost, it is asked for again.
CREATE OR REPLACE FUNCTION agentrun_1.renew(p_run uuid[], p_epoch integer[], p_lease double precision)
RETURNS TABLE (run_id uuid, epoch integer, renewed boolean)
LANGUAGE sql VOLATILE AS $$
    WITH n AS (
        SELECT * FROM unnest(p_run, p_epoch) AS t (run_id, epoch)
    ), locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN n USING (run_id, epoch)
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a SKIP LOCKED
    ), moved AS (
        UPDATE attempts a SET lease_expires_at = now() + make_interval(secs => p_lease) FROM locked
        WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch
    )
    SELECT run_id, epoch, true FROM moved
    UNION ALL
    SELECT a.run_id, a.epoch, false FROM attempts a JOIN n USING (run_id, epoch)
    WHERE a.outcome = 'running' AND NOT EXISTS (SELECT 1 FROM moved m WHERE m.run_id = a.run_id AND m.epoch = a.epoch)
$$;

-- hold_attempts: locks the attempts of a group, and of runs with calls to be booked also the later ones, which have copied what was spent.
CREATE OR REPLACE FUNCTION agentrun_1.hold_attempts(p_run uuid[], p_epoch integer[], p_ledger jsonb) RETURNS void
LANGUAGE sql VOLATILE AS $$
    SELECT FROM attempts a JOIN (
        SELECT run_id, epoch AS low, epoch AS high FROM unnest(p_run, p_epoch) AS n (run_id, epoch)
        UNION SELECT x.run_id, min(x.epoch), 2147483647 FROM jsonb_to_recordset(p_ledger) AS x (run_id uuid, epoch integer) GROUP BY 1
    ) n ON n.run_id = a.run_id AND a.epoch BETWEEN n.low AND n.high
    ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
$$;

-- flush: events and the numbers reserved for the next ones, and a checkpoint where one is given. Neither seq_reserved nor the checkpoint
-- goes back: a request may arrive after the next one.
CREATE OR REPLACE FUNCTION agentrun_1.flush(
    p_run uuid[], p_epoch integer[], p_reserve integer[], p_checkpoint_seq integer[], p_checkpoint text[],
    e_run uuid[], e_epoch integer[], e_seq integer[], e_kind text[], e_data text[], p_ledger jsonb)
RETURNS TABLE (run_id uuid, epoch integer)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_runs uuid[];
    v_epochs integer[];
    v_costs numeric[];
BEGIN
    IF p_ledger IS NOT NULL THEN
        SELECT * INTO v_runs, v_epochs, v_costs FROM agentrun_1.book_calls(p_ledger);
        PERFORM agentrun_1.hold_attempts(p_run, p_epoch, p_ledger);
    END IF;
    RETURN QUERY
    WITH asked AS (
        SELECT * FROM unnest(p_run, p_epoch, p_reserve, p_checkpoint_seq, p_checkpoint) AS t (run_id, epoch, reserve, ck_seq, ck)
    ), n AS (                                      -- an attempt may be in a group twice: a flush, and its checkpoint
        SELECT DISTINCT ON (run_id, epoch) run_id, epoch, max(reserve) OVER w AS reserve, ck_seq, ck FROM asked
        WINDOW w AS (PARTITION BY run_id, epoch) ORDER BY run_id, epoch, ck_seq DESC NULLS LAST
    ), locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN n ON n.run_id = a.run_id AND n.epoch = a.epoch
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    ), fenced AS (
        UPDATE attempts a SET seq_reserved = greatest(a.seq_reserved, n.reserve),
               checkpoint = CASE WHEN n.ck_seq >= a.checkpoint_seq THEN n.ck::jsonb ELSE a.checkpoint END,
               checkpoint_seq = greatest(a.checkpoint_seq, coalesce(n.ck_seq, -1))
        FROM locked JOIN n ON n.run_id = locked.run_id AND n.epoch = locked.epoch
        WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch
    ), stored AS (
        INSERT INTO messages (run_id, seq, epoch, kind, data)
        SELECT e.run_id, e.seq, e.epoch, e.kind, e.data::json
        FROM unnest(e_run, e_epoch, e_seq, e_kind, e_data) AS e (run_id, epoch, seq, kind, data)
        JOIN fenced f ON f.run_id = e.run_id AND f.epoch = e.epoch
        ORDER BY e.run_id, e.seq ON CONFLICT DO NOTHING
    )
    SELECT fenced.run_id, fenced.epoch FROM fenced;
    IF p_ledger IS NOT NULL THEN PERFORM agentrun_1.settle(p_ledger, v_runs, v_epochs, v_costs, NULL); END IF;
END $$;

-- next_head: the session's unfinished run of lowest position, if it may be published now.
CREATE OR REPLACE FUNCTION agentrun_1.next_head(p_session uuid) RETURNS uuid
LANGUAGE sql VOLATILE AS $$
    SELECT CASE WHEN h.status = 'pending' AND (h.not_before IS NULL OR h.not_before <= now()) THEN h.id END
    FROM (SELECT id, status, not_before FROM runs WHERE session_id = p_session AND status IN ('pending', 'running')
          ORDER BY session_position LIMIT 1) h
$$;

-- finish: the attempt ends its own run: last events, ledger, status, result, fates, in one transaction. A run that failed because nobody
-- knows what came of one of its effects is put aside as a dead letter.
CREATE OR REPLACE FUNCTION agentrun_1.finish(
    p_run uuid[], p_epoch integer[], p_status text[], p_result text[], p_error text[],
    e_run uuid[], e_epoch integer[], e_seq integer[], e_kind text[], e_data text[], p_ledger jsonb)
RETURNS TABLE (run_id uuid, epoch integer, ok boolean, next_head uuid)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_runs uuid[];
    v_epochs integer[];
    v_costs numeric[];
    v_ended uuid[];
BEGIN
    IF p_ledger IS NOT NULL THEN
        SELECT * INTO v_runs, v_epochs, v_costs FROM agentrun_1.book_calls(p_ledger);
    END IF;
    PERFORM 1 FROM sessions WHERE id IN (SELECT r.session_id FROM runs r WHERE r.id = ANY (p_run)) ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM runs WHERE id = ANY (p_run) ORDER BY id FOR NO KEY UPDATE;
    IF p_ledger IS NOT NULL THEN
        PERFORM agentrun_1.hold_attempts(p_run, p_epoch, p_ledger);
    END IF;

    WITH n AS (
        SELECT * FROM unnest(p_run, p_epoch, p_status, p_result, p_error) AS t (run_id, epoch, status, result, error)
    ), locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN n ON n.run_id = a.run_id AND n.epoch = a.epoch
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    ), fenced AS (
        UPDATE attempts a SET outcome = 'finished', ended_at = clock_timestamp() FROM locked
        WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch
    ), stored AS (
        INSERT INTO messages (run_id, seq, epoch, kind, data)
        SELECT e.run_id, e.seq, e.epoch, e.kind, e.data::json
        FROM unnest(e_run, e_epoch, e_seq, e_kind, e_data) AS e (run_id, epoch, seq, kind, data)
        JOIN fenced f ON f.run_id = e.run_id AND f.epoch = e.epoch
        ORDER BY e.run_id, e.seq ON CONFLICT DO NOTHING
    ), ended AS (
        UPDATE runs r SET status = n.status, result = n.result::jsonb, error = n.error::jsonb, finished_at = clock_timestamp()
        FROM n JOIN fenced f ON f.run_id = n.run_id AND f.epoch = n.epoch WHERE r.id = n.run_id
        RETURNING r.id, r.status, r.input, r.error, r.epoch
    ), answered AS (
        UPDATE inputs i SET fate = CASE ended.status WHEN 'succeeded' THEN 'answered_in' ELSE 'failed_in' END, fate_run = ended.id
        FROM ended WHERE i.held_by = ended.id AND i.fate IS NULL
    ), aside AS (                                  -- a person has to look before it may be done again
        INSERT INTO dead_letters (run_id, payload, reason, last_error, attempts)
        SELECT ended.id, ended.input, 'effect_unknown', ended.error, ended.epoch FROM ended
        WHERE ended.status = 'failed' AND ended.error ->> 'type' = 'effect_unknown' ORDER BY ended.id ON CONFLICT DO NOTHING
    )
    SELECT array_agg(ended.id) INTO v_ended FROM ended;
    PERFORM agentrun_1.settle(p_ledger, v_runs, v_epochs, v_costs, v_ended);

    RETURN QUERY
    SELECT n.run_id, n.epoch, coalesce(a.outcome = 'finished', false), agentrun_1.next_head(r.session_id)
    FROM unnest(p_run, p_epoch) AS n (run_id, epoch)
    LEFT JOIN attempts a ON a.run_id = n.run_id AND a.epoch = n.epoch
    LEFT JOIN runs r ON r.id = n.run_id;
END $$;

-- take_over: takes a run from its attempt, if it has one, and closes the log: what was reserved and never stored becomes `void`, then
-- `restart {keep}`, then the terminal event if the run ends. The epoch stays: only a claim raises it. Reasons:
--   lost         by a reaper: only at the epoch seen and past the lease, and only until p_until (null: whenever), since a lease that
--                ran out in a stall of Postgres proves nothing; pending again, or failed and put aside after p_max_lost
--   handed_back  by a draining worker, its own; retrying  by an attempt, its own, due again after p_after seconds:
--                both bring their buffer and lower seq_reserved to their last number, so nothing has to be voided
--   cancelled, superseded  end the run, whoever holds it
-- The caller holds the locks of session, run and attempt, and settles the budget of a run that has ended.
CREATE OR REPLACE FUNCTION agentrun_1.take_over_locked(
    p_run uuid, p_reason text, p_epoch integer, p_reserved integer, p_after double precision, p_error text, p_by uuid,
    p_max_lost integer, p_until timestamptz)
RETURNS boolean
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_run runs;
    v_attempt attempts;
    v_outcome text := CASE WHEN p_reason IN ('cancelled', 'superseded') THEN 'interrupted' ELSE p_reason END;
    v_status text := CASE p_reason WHEN 'cancelled' THEN 'cancelled' WHEN 'superseded' THEN 'superseded' ELSE 'pending' END;
    v_error jsonb := p_error::jsonb;
    v_lost integer := 0;
    v_stored integer;
    v_next integer;
BEGIN
    SELECT * INTO v_run FROM runs WHERE id = p_run;
    IF NOT FOUND OR v_run.status NOT IN ('pending', 'running') THEN RETURN false; END IF;
    IF v_run.status = 'pending' AND v_outcome <> 'interrupted' THEN RETURN false; END IF;
    IF p_epoch IS NOT NULL AND v_run.epoch <> p_epoch THEN RETURN false; END IF;

    IF v_run.status = 'running' THEN
        UPDATE attempts a SET outcome = v_outcome, ended_at = clock_timestamp(), seq_reserved = coalesce(p_reserved, a.seq_reserved)
        WHERE a.run_id = p_run AND a.epoch = v_run.epoch AND a.outcome = 'running'
          AND (p_reason <> 'lost' OR (a.lease_expires_at < now() AND now() <= coalesce(p_until, 'infinity')))
        RETURNING * INTO v_attempt;
        IF NOT FOUND THEN RETURN false; END IF;
    END IF;

    IF p_reason = 'lost' THEN
        UPDATE ledger l SET lost = true WHERE l.run_id = p_run AND l.epoch = v_run.epoch AND NOT l.lost;
        SELECT count(*) INTO v_lost FROM attempts a WHERE a.run_id = p_run AND a.outcome = 'lost';
        IF v_lost >= p_max_lost THEN
            v_status := 'failed';
            v_error := jsonb_build_object('type', 'lost_too_often', 'message', format(
                '%s attempts ended without a word: the worker was killed, ran out of memory or lost its stores. '
                'The run was put aside; look at its dead letter.', v_lost));
            INSERT INTO dead_letters (run_id, payload, reason, last_error, attempts)
            VALUES (p_run, v_run.input, 'lost_too_often', v_run.error, v_run.epoch);
        END IF;
    END IF;

    SELECT coalesce(max(seq), -1) INTO v_stored FROM messages WHERE run_id = p_run;
    v_next := v_stored + 1;
    IF v_attempt.run_id IS NOT NULL THEN
        INSERT INTO messages (run_id, seq, epoch, kind, data)
        SELECT p_run, s, v_run.epoch, 'void', '{}' FROM generate_series(v_next, v_attempt.seq_reserved) AS s;
        v_next := greatest(v_next, v_attempt.seq_reserved + 1);
        INSERT INTO messages (run_id, seq, epoch, kind, data) VALUES (p_run, v_next, v_run.epoch, 'restart',
            json_build_object('keep', CASE WHEN v_status = 'pending' THEN v_attempt.checkpoint_seq ELSE v_stored END));
        v_next := v_next + 1;
    END IF;
    IF v_status <> 'pending' THEN
        INSERT INTO messages (run_id, seq, epoch, kind, data) VALUES (p_run, v_next, v_run.epoch, v_status, CASE v_status
            WHEN 'failed' THEN json_build_object('error', v_error)
            WHEN 'superseded' THEN json_build_object('by', p_by) ELSE '{}'::json END);
        UPDATE inputs SET fate = CASE v_status WHEN 'failed' THEN 'failed_in' ELSE 'cancelled_in' END, fate_run = p_run
        WHERE held_by = p_run AND fate IS NULL AND v_status <> 'superseded';
    END IF;
    UPDATE runs SET status = v_status, error = coalesce(v_error, error), superseded_by = p_by,
        not_before = CASE WHEN v_status = 'pending' AND p_after > 0 THEN clock_timestamp() + make_interval(secs => p_after) END,
        finished_at = CASE WHEN v_status <> 'pending' THEN clock_timestamp() END
    WHERE id = p_run;
    RETURN true;
END $$;

-- take_over of a group. ok: done now, or found done by this very call earlier (its reply was lost). The log's last rows are what the
-- clients must see at once.
CREATE OR REPLACE FUNCTION agentrun_1.take_over(
    p_run uuid[], p_reason text[], p_epoch integer[], p_reserved integer[], p_after double precision[], p_error text[], p_by uuid[],
    p_max_lost integer, p_until timestamptz, e_run uuid[], e_epoch integer[], e_seq integer[], e_kind text[], e_data text[], p_ledger jsonb)
RETURNS TABLE (run_id uuid, ok boolean, status text, epoch integer, owner text, next_head uuid,
               event_seq integer[], event_kind text[], event_data text[])
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    n record;
    v_runs uuid[];
    v_epochs integer[];
    v_costs numeric[];
    v_taken uuid[];
BEGIN
    IF p_ledger IS NOT NULL THEN
        SELECT * INTO v_runs, v_epochs, v_costs FROM agentrun_1.book_calls(p_ledger);
    END IF;
    PERFORM 1 FROM sessions WHERE id IN (SELECT r.session_id FROM runs r WHERE r.id = ANY (p_run)) ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM runs WHERE id = ANY (p_run) ORDER BY id FOR NO KEY UPDATE;
    PERFORM agentrun_1.hold_attempts(p_run || r.ids, p_epoch || r.epochs, p_ledger)
    FROM (SELECT array_agg(x.id) AS ids, array_agg(x.epoch) AS epochs FROM runs x WHERE x.id = ANY (p_run)) r;

    -- the buffer of an attempt that gives back its own run, while it still holds it
    INSERT INTO messages (run_id, seq, epoch, kind, data)
    SELECT e.run_id, e.seq, e.epoch, e.kind, e.data::json
    FROM unnest(e_run, e_epoch, e_seq, e_kind, e_data) AS e (run_id, epoch, seq, kind, data)
    JOIN attempts a ON a.run_id = e.run_id AND a.epoch = e.epoch AND a.outcome = 'running'
    ON CONFLICT DO NOTHING;

    FOR n IN SELECT * FROM unnest(p_run, p_reason, p_epoch, p_reserved, p_after, p_error, p_by)
             AS t (run_id, reason, epoch, reserved, after, error, by_run) ORDER BY 1 LOOP
        IF agentrun_1.take_over_locked(n.run_id, n.reason, n.epoch, n.reserved, n.after, n.error, n.by_run, p_max_lost, p_until) THEN
            v_taken := v_taken || n.run_id;
        END IF;
    END LOOP;
    PERFORM agentrun_1.settle(p_ledger, v_runs, v_epochs, v_costs, (
        SELECT array_agg(r.id) FROM runs r WHERE r.id = ANY (v_taken) AND r.status NOT IN ('pending', 'running')));

    RETURN QUERY
    SELECT n.run_id,
           coalesce(CASE WHEN n.reason IN ('cancelled', 'superseded') THEN r.status = n.reason
                         ELSE a.outcome = n.reason END, false),
           r.status, r.epoch, a.owner, agentrun_1.next_head(r.session_id), v.seqs, v.kinds, v.datas
    FROM unnest(p_run, p_reason, p_epoch) WITH ORDINALITY AS n (run_id, reason, epoch, ord)
    LEFT JOIN runs r ON r.id = n.run_id
    LEFT JOIN attempts a ON a.run_id = n.run_id AND a.epoch = coalesce(n.epoch, r.epoch)
    LEFT JOIN LATERAL (
        SELECT array_agg(m.seq ORDER BY m.seq) AS seqs, array_agg(m.kind ORDER BY m.seq) AS kinds,
               array_agg(m.data::text ORDER BY m.seq) AS datas
        FROM (SELECT * FROM messages x WHERE x.run_id = n.run_id ORDER BY x.seq DESC LIMIT 2) m
        WHERE m.epoch = r.epoch AND m.kind IN ('restart', 'failed', 'cancelled', 'superseded')
    ) v ON true
    ORDER BY n.ord;
END $$;
