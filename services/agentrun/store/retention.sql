-- Retention: old rows go in bounded batches. What others hold is passed over (SKIP LOCKED), so that nobody waits for a whole pass; a
-- submission waits at most for one batch, and only to a session of which nothing was heard for days.

-- fitting: the first of these runs, as many as had p_events events in all when their logs were whole, at least one.
CREATE OR REPLACE FUNCTION agentrun_1.fitting(p_runs uuid[], p_events integer) RETURNS uuid[]
LANGUAGE sql STABLE AS $$
    SELECT array_agg(x.id ORDER BY x.place) FROM (
        SELECT u.id, u.place,
               sum((SELECT coalesce(max(m.seq) + 1, 0) FROM messages m WHERE m.run_id = u.id)) OVER (ORDER BY u.place) AS events
        FROM unnest(p_runs) WITH ORDINALITY AS u (id, place)) x
    WHERE x.events <= p_events OR x.place = 1
$$;

-- archive: events of runs that ended more than p_age seconds ago are thinned out, at most p_rows of at most p_runs runs: `void`, and each delta
-- that nobody needs: its whole text follows in a `_done`, or a `restart` has taken it back. A delta without such a `_done` is the only copy of what
-- was said, and stays. A run is archived once nothing is left to be removed; readers know by the holes. Only so many runs are taken as had p_rows
-- events in all, at least one: more would be read again by each batch up to their own.
CREATE OR REPLACE FUNCTION agentrun_1.archive(p_age double precision, p_runs integer, p_rows integer, OUT removed integer, OUT archived integer)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_ids uuid[];
BEGIN
    removed := 0;
    archived := 0;
    SELECT array_agg(x.id) INTO v_ids FROM (
        SELECT r.id FROM runs r
        WHERE r.archived_at IS NULL AND r.finished_at IS NOT NULL AND r.finished_at < now() - make_interval(secs => p_age)
        ORDER BY r.finished_at LIMIT p_runs FOR NO KEY UPDATE SKIP LOCKED) x;
    v_ids := agentrun_1.fitting(v_ids, p_rows);
    IF v_ids IS NULL THEN RETURN; END IF;

    WITH restarts AS MATERIALIZED (
        SELECT m.run_id, m.seq, (m.data ->> 'keep')::integer AS keep FROM messages m WHERE m.run_id = ANY (v_ids) AND m.kind = 'restart'
    ), wholes AS MATERIALIZED (
        SELECT m.run_id, replace(m.kind, '_done', '_delta') AS kind, m.data ->> 'item' AS item, max(m.seq) AS seq FROM messages m
        WHERE m.run_id = ANY (v_ids) AND m.kind IN ('text_done', 'reasoning_done', 'tool_arguments_done')
          AND NOT EXISTS (SELECT 1 FROM restarts x WHERE x.run_id = m.run_id AND x.seq > m.seq AND x.keep < m.seq)
        GROUP BY 1, 2, 3
    ), spare AS (
        SELECT m.run_id, m.seq FROM messages m
        LEFT JOIN wholes w ON w.run_id = m.run_id AND w.kind = m.kind AND w.item = m.data ->> 'item' AND w.seq > m.seq
        WHERE m.run_id = ANY (v_ids) AND (m.kind = 'void' OR m.kind IN ('text_delta', 'reasoning_delta', 'tool_arguments_delta')
            AND (w.seq IS NOT NULL
                 OR EXISTS (SELECT 1 FROM restarts x WHERE x.run_id = m.run_id AND x.seq > m.seq AND x.keep < m.seq)))
        LIMIT p_rows
    )
    DELETE FROM messages m USING spare WHERE m.run_id = spare.run_id AND m.seq = spare.seq;
    GET DIAGNOSTICS removed = ROW_COUNT;

    IF removed < p_rows THEN
        UPDATE runs r SET archived_at = clock_timestamp() WHERE r.id = ANY (v_ids);
        archived := cardinality(v_ids);
    END IF;
END $$;

-- delete_runs: looks at p_runs archived runs that ended more than p_age seconds ago, after (p_ended, p_run) in the order of their ends, and
-- deletes them with all that belongs to them, and sessions that are empty then. The ledger stays. Kept are runs that
--   wait for a person: an open dead letter, an effect that is not settled
--   are still asked for: the outcome of a slot that is remembered, the beginning of a redrive, a message that another run answers
-- Answers how many it saw (p_runs if there may be more) and deleted, and where it stands. Only so many runs are taken as had 10,000 events in all,
-- at least one. Of a run that still has more, the first 10,000 go; the last event goes with the run, or a reader would wait for it.
CREATE OR REPLACE FUNCTION agentrun_1.delete_runs(
    p_age double precision, p_ended timestamptz, p_run uuid, p_runs integer,
    OUT seen integer, OUT deleted integer, OUT ended timestamptz, OUT run uuid)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_page uuid[];
    v_ids uuid[];
    v_sessions uuid[];
    v_ended timestamptz[];
    v_events CONSTANT integer := 10000;
    v_rest integer;
BEGIN
    deleted := 0;
    SELECT count(*), array_agg(x.id), array_agg(x.session_id), array_agg(x.finished_at) INTO seen, v_page, v_sessions, v_ended FROM (
        SELECT r.id, r.session_id, r.finished_at FROM runs r
        WHERE r.archived_at IS NOT NULL AND r.finished_at < now() - make_interval(secs => p_age)
          AND (r.finished_at, r.id) > (p_ended, p_run)
        ORDER BY r.finished_at, r.id LIMIT p_runs) x;
    IF seen = 0 THEN RETURN; END IF;
    v_page := agentrun_1.fitting(v_page, v_events);
    IF cardinality(v_page) < seen THEN seen := p_runs; END IF;
    run := v_page[cardinality(v_page)];
    ended := v_ended[cardinality(v_page)];
    v_sessions := v_sessions[:cardinality(v_page)];

    SELECT array_agg(x.id) INTO v_sessions FROM (
        SELECT s.id FROM sessions s WHERE s.id = ANY (v_sessions) ORDER BY s.id FOR NO KEY UPDATE SKIP LOCKED) x;
    SELECT array_agg(r.id) INTO v_ids FROM runs r
    WHERE r.id = ANY (v_page) AND r.session_id = ANY (v_sessions)
      AND NOT EXISTS (SELECT 1 FROM dead_letters d WHERE d.run_id = r.id AND d.redriven_run_id IS NULL AND d.discarded_at IS NULL)
      AND NOT EXISTS (SELECT 1 FROM effects e WHERE e.run_id = r.id AND e.state IN ('initiated', 'unknown'))
      AND NOT EXISTS (SELECT 1 FROM slots t WHERE t.task = r.cron_task AND t.slot = r.slot)
      AND NOT EXISTS (SELECT 1 FROM runs n WHERE n.redrive_of = r.id)
      AND NOT EXISTS (SELECT 1 FROM inputs i WHERE i.run_id = r.id AND i.held_by <> r.id);
    IF v_ids IS NULL THEN RETURN; END IF;

    IF cardinality(v_page) = 1 THEN                -- several have no more than v_events in all
        SELECT x.seq INTO v_rest FROM messages x WHERE x.run_id = v_ids[1] ORDER BY x.seq OFFSET v_events LIMIT 1;
        IF FOUND THEN
            DELETE FROM messages m WHERE m.run_id = v_ids[1] AND m.seq < v_rest;
            seen := p_runs;
            ended := p_ended;                      -- again from the same place
            run := p_run;
            RETURN;
        END IF;
    END IF;
    DELETE FROM messages m WHERE m.run_id = ANY (v_ids);
    DELETE FROM inputs i WHERE i.held_by = ANY (v_ids);
    DELETE FROM effects e WHERE e.run_id = ANY (v_ids);
    DELETE FROM dead_letters d WHERE d.run_id = ANY (v_ids);
    DELETE FROM attempts a WHERE a.run_id = ANY (v_ids);
    DELETE FROM runs r WHERE r.id = ANY (v_ids);
    GET DIAGNOSTICS deleted = ROW_COUNT;
    DELETE FROM sessions s WHERE s.id = ANY (v_sessions) AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id);
END $$;

-- delete_slots: at most p_rows slots of CronTasks that were deleted more than p_age seconds ago, after which their runs may go. The CronTasks'
-- rows stay: they say how far each was decided, and reports name them.
CREATE OR REPLACE FUNCTION agentrun_1.delete_slots(p_age double precision, p_rows integer) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_count integer;
BEGIN
    WITH gone AS (                                 -- whoever holds one brings it back at this moment
        SELECT t.uid FROM cron_tasks t WHERE t.deleted_at < now() - make_interval(secs => p_age)
        AND EXISTS (SELECT 1 FROM slots s WHERE s.task = t.uid) ORDER BY t.uid FOR NO KEY UPDATE SKIP LOCKED
    ), old AS (
        SELECT s.task, s.slot FROM slots s JOIN gone ON gone.uid = s.task LIMIT p_rows
    )
    DELETE FROM slots s USING old WHERE s.task = old.task AND s.slot = old.slot;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;

-- delete_ledger: at most p_rows calls that were booked more than p_age seconds ago.
CREATE OR REPLACE FUNCTION agentrun_1.delete_ledger(p_age double precision, p_rows integer) RETURNS integer
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_count integer;
BEGIN
    DELETE FROM ledger l USING (
        SELECT x.run_id, x.epoch, x.call FROM ledger x WHERE x.at < now() - make_interval(secs => p_age) ORDER BY x.at LIMIT p_rows
    ) old WHERE l.run_id = old.run_id AND l.epoch = old.epoch AND l.call = old.call;
    GET DIAGNOSTICS v_count = ROW_COUNT;
    RETURN v_count;
END $$;
