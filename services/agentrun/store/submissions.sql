-- How a message becomes a run: in a group, or alone where the session has an unfinished run and Merge or Reject must decide.

-- submit_group: insert first, then read back the losers; a replay changes nothing. Answers in the order asked.
-- Where the policy is not Enqueue, only the first row of a session is inserted here, and only if the session has no unfinished run. What is
-- not found afterwards has left the group (run_id null): it is to be decided by follow_up, one after the other in their order. So has what
-- was to go into a session that retention deleted at this moment.
-- With p_budget a new run reserves what it may cost, last of all; what does not fit is taken back (run_id null, refused says why).
CREATE OR REPLACE FUNCTION agentrun_1.submit_group(
    p_run uuid[], p_session uuid[], p_input uuid[], p_agent text[], p_user text[], p_external text[], p_given text[],
    p_key text[], p_client_key text[], p_body_hash text[], p_body text[], p_content text[], p_policy text, p_budget jsonb)
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean,
               refused text, wait integer)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_ids uuid[];
    v_base bigint[];
    v_new uuid[];
    v_users text[];
    v_refused uuid[];
    v_scopes text[];
    v_waits integer[];
BEGIN
    -- sessions in the order of their unique key, so that two groups cannot wait for each other
    INSERT INTO sessions (id, agent, user_id, external_id)
    SELECT DISTINCT ON (n.agent, n.user_id, n.external_id) n.id, n.agent, n.user_id, n.external_id
    FROM unnest(p_session, p_agent, p_user, p_external) AS n (id, agent, user_id, external_id)
    ORDER BY n.agent, n.user_id, n.external_id
    ON CONFLICT DO NOTHING;

    WITH n AS (
        SELECT agent, user_id, external_id, count(*) AS wanted
        FROM unnest(p_agent, p_user, p_external) AS t (agent, user_id, external_id) GROUP BY 1, 2, 3
    ), locked AS (
        SELECT s.id, n.wanted FROM sessions s JOIN n USING (agent, user_id, external_id) ORDER BY s.id FOR NO KEY UPDATE OF s
    ), moved AS (
        UPDATE sessions s SET next_position = s.next_position + locked.wanted FROM locked WHERE s.id = locked.id
        RETURNING s.id, s.next_position - locked.wanted AS base
    )
    SELECT array_agg(id), array_agg(base) INTO v_ids, v_base FROM moved;

    WITH n AS (
        SELECT t.*, s.id AS session_id, b.base
        FROM unnest(p_run, p_input, p_agent, p_user, p_external, p_given, p_key, p_client_key, p_body_hash, p_body, p_content)
             WITH ORDINALITY AS t (id, input_id, agent, user_id, external_id, given, key, client_key, body_hash, body, content, ord)
        JOIN sessions s USING (agent, user_id, external_id)
        JOIN unnest(v_ids, v_base) AS b (id, base) ON b.id = s.id
    ), numbered AS (
        SELECT n.*, row_number() OVER (PARTITION BY n.session_id ORDER BY n.ord) - 1 AS place FROM n
    ), tried AS (
        SELECT numbered.*, numbered.base + numbered.place AS position FROM numbered
        WHERE p_policy = 'Enqueue' OR numbered.place = 0 AND (  -- a scalar: one look into the index for each, never a join
            SELECT b.id FROM runs b WHERE b.session_id = numbered.session_id AND b.status IN ('pending', 'running') LIMIT 1) IS NULL
    ), made AS (
        INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, idempotency_key, client_key, body_hash, input,
                          reserved_usd, budget_day)
        SELECT id, agent, user_id, session_id, given, position, key, client_key, body_hash, body::jsonb,
               (p_budget ->> 'run')::numeric, agentrun_1.budget_day(p_budget)
        FROM tried ORDER BY user_id, given, client_key, key
        ON CONFLICT DO NOTHING RETURNING id
    ), put AS (
        INSERT INTO inputs (id, run_id, held_by, session_id, position, content)
        SELECT n.input_id, n.id, n.id, n.session_id, n.position, n.content::jsonb FROM tried n JOIN made ON made.id = n.id
    )
    SELECT array_agg(n.id ORDER BY n.ord), array_agg(n.user_id ORDER BY n.ord) INTO v_new, v_users
    FROM tried n JOIN made ON made.id = n.id;

    IF p_budget IS NOT NULL AND v_new IS NOT NULL THEN
        SELECT array_agg(x.run_id), array_agg(x.scope), array_agg(x.wait) INTO v_refused, v_scopes, v_waits
        FROM agentrun_1.reserve(v_new, v_users, p_budget) x;
        DELETE FROM inputs i WHERE i.run_id = ANY (v_refused);
        DELETE FROM runs r WHERE r.id = ANY (v_refused);
    END IF;

    -- a refused key reuse stores nothing, so the session that was made for it goes too; nobody else has seen it yet
    IF coalesce(cardinality(v_new), 0) - coalesce(cardinality(v_refused), 0) < cardinality(p_run) THEN
        DELETE FROM sessions s WHERE s.id = ANY (p_session) AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id);
    END IF;

    RETURN QUERY
    SELECT r.id, r.session_id, r.status, r.id = n.id, r.idempotency_key <> n.key,
           r.status = 'pending' AND NOT EXISTS (
               SELECT 1 FROM runs b WHERE b.session_id = r.session_id AND b.session_position < r.session_position
               AND b.status IN ('pending', 'running')),
           f.scope, f.wait
    FROM unnest(p_run, p_agent, p_user, p_given, p_key, p_client_key)
         WITH ORDINALITY AS n (id, agent, user_id, given, key, client_key, ord)
    LEFT JOIN unnest(v_refused, v_scopes, v_waits) AS f (id, scope, wait) ON f.id = n.id
    LEFT JOIN LATERAL (
        SELECT * FROM runs x WHERE x.idempotency_key = n.key
        UNION ALL
        SELECT * FROM runs x WHERE n.client_key IS NOT NULL AND x.agent = n.agent AND x.user_id = n.user_id
            AND x.session_given = n.given AND x.client_key = n.client_key AND x.idempotency_key <> n.key
        LIMIT 1
    ) r ON true
    ORDER BY n.ord;
END $$;

-- submit_group, submit: what code before schema 4, and before schema 3, calls.
CREATE OR REPLACE FUNCTION agentrun_1.submit_group(
    p_run uuid[], p_session uuid[], p_input uuid[], p_agent text[], p_user text[], p_external text[], p_given text[],
    p_key text[], p_client_key text[], p_body_hash text[], p_body text[], p_content text[], p_policy text)
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean)
LANGUAGE sql VOLATILE AS $$
    SELECT run_id, session_id, status, inserted, reused, is_head
    FROM agentrun_1.submit_group(p_run, p_session, p_input, p_agent, p_user, p_external, p_given, p_key, p_client_key,
                                 p_body_hash, p_body, p_content, p_policy, NULL)
$$;

CREATE OR REPLACE FUNCTION agentrun_1.submit(
    p_run uuid[], p_session uuid[], p_input uuid[], p_agent text[], p_user text[], p_external text[], p_given text[],
    p_key text[], p_client_key text[], p_body_hash text[], p_body text[], p_content text[])
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean)
LANGUAGE sql VOLATILE AS $$
    SELECT * FROM agentrun_1.submit_group(p_run, p_session, p_input, p_agent, p_user, p_external, p_given, p_key, p_client_key,
                                          p_body_hash, p_body, p_content, 'Enqueue')
$$;

-- chain_of: the first run of a redrive chain, else the run itself. Effects belong to the chain.
CREATE OR REPLACE FUNCTION agentrun_1.chain_of(p_run uuid) RETURNS uuid
LANGUAGE plpgsql STABLE AS $$
DECLARE
    v_run uuid := p_run;
    v_before uuid;
BEGIN
    LOOP
        SELECT r.redrive_of INTO v_before FROM runs r WHERE r.id = v_run;
        IF v_before IS NULL THEN RETURN v_run; END IF;
        v_run := v_before;
    END LOOP;
END $$;

-- follow_up: one message, decided under its session's lock. Insert first: what is there already is read back and changes nothing.
--   no unfinished run in the session    it is the head
--   Reject                              nothing is stored; answers `rejected` and the session's last unfinished run
--   Merge                               the last unfinished run is superseded and its inputs are held by the new one, unless it has any
--                                       effect, was started by a CronTask, is a redrive (a new message must not share its fate), or its
--                                       first input is older than the window
--   else                                it is the session's next run
-- The session's lock keeps runs from ending (finish and take_over take it first), not from being claimed; the run's lock does that, and
-- the attempt's lock keeps effects from being initiated. So effects are read in a statement after the one that locked the attempt.
-- Over the budget it raises AR429; whoever calls it rolls all of it back.
CREATE OR REPLACE FUNCTION agentrun_1.follow_up_within(
    p_run uuid, p_session uuid, p_input uuid, p_agent text, p_user text, p_external text, p_given text,
    p_key text, p_client_key text, p_body_hash text, p_body text, p_content text, p_policy text, p_window double precision,
    p_budget jsonb)
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean, rejected boolean,
               superseded uuid, epoch integer, owner text, event_seq integer[], event_kind text[], event_data text[])
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_session uuid;
    v_position bigint;
    v_last runs;
    v_merged runs;
    v_refusal record;
    v_chain uuid;
    v_made integer;
BEGIN
    LOOP                                           -- between the two, retention may have deleted a session that was empty
        INSERT INTO sessions (id, agent, user_id, external_id) VALUES (p_session, p_agent, p_user, p_external) ON CONFLICT DO NOTHING;
        SELECT s.id, s.next_position INTO v_session, v_position FROM sessions s
        WHERE s.agent = p_agent AND s.user_id = p_user AND s.external_id = p_external FOR NO KEY UPDATE;
        EXIT WHEN FOUND;
    END LOOP;

    INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, idempotency_key, client_key, body_hash, input,
                      reserved_usd, budget_day)
    VALUES (p_run, p_agent, p_user, v_session, p_given, v_position, p_key, p_client_key, p_body_hash, p_body::jsonb,
            (p_budget ->> 'run')::numeric, agentrun_1.budget_day(p_budget))
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_made = ROW_COUNT;

    IF v_made = 0 THEN
        DELETE FROM sessions s WHERE s.id = p_session AND NOT EXISTS (SELECT 1 FROM runs r WHERE r.session_id = s.id);
    ELSE
        LOOP
            SELECT * INTO v_last FROM runs r
            WHERE r.session_id = v_session AND r.id <> p_run AND r.status IN ('pending', 'running')
            ORDER BY r.session_position DESC LIMIT 1;
            EXIT WHEN NOT FOUND OR p_policy = 'Enqueue';
            IF p_policy = 'Reject' THEN
                DELETE FROM runs r WHERE r.id = p_run;
                RETURN QUERY SELECT v_last.id, v_session, v_last.status, false, false, false, true,
                                    NULL::uuid, NULL::integer, NULL::text, NULL::integer[], NULL::text[], NULL::text[];
                RETURN;
            END IF;
            SELECT * INTO v_last FROM runs r WHERE r.id = v_last.id FOR NO KEY UPDATE;
            CONTINUE WHEN v_last.status NOT IN ('pending', 'running');           -- it has just ended: decide again
            PERFORM 1 FROM attempts a WHERE a.run_id = v_last.id AND a.epoch = v_last.epoch FOR NO KEY UPDATE;
            v_chain := agentrun_1.chain_of(v_last.id);
            EXIT WHEN v_last.cron_task IS NOT NULL OR v_last.redrive_of IS NOT NULL
                OR EXISTS (SELECT 1 FROM effects e WHERE e.run_id = v_last.id)
                OR EXISTS (SELECT 1 FROM effects e WHERE e.chain_id = v_chain)
                OR now() > (SELECT min(i.created_at) + make_interval(secs => p_window) FROM inputs i WHERE i.held_by = v_last.id);
            IF agentrun_1.take_over_locked(v_last.id, 'superseded', v_last.epoch, NULL, 0, NULL, p_run, 0, NULL) THEN
                UPDATE inputs i SET held_by = p_run WHERE i.held_by = v_last.id AND i.fate IS NULL;
                v_merged := v_last;
            END IF;
            EXIT;
        END LOOP;
        UPDATE sessions s SET next_position = v_position + 1 WHERE s.id = v_session;
        INSERT INTO inputs (id, run_id, held_by, session_id, position, content)
        VALUES (p_input, p_run, p_run, v_session, v_position, p_content::jsonb);

        -- what the merged run has not spent is there for the new one; their counters are locked together
        IF p_budget IS NOT NULL AND v_merged.reserved_usd IS NOT NULL THEN
            PERFORM agentrun_1.hold_counters(
                ARRAY['agent', 'agent', 'user:' || p_user, 'user:' || p_user],
                ARRAY[v_merged.budget_day, agentrun_1.budget_day(p_budget), v_merged.budget_day, agentrun_1.budget_day(p_budget)]);
        END IF;
        IF v_merged.reserved_usd IS NOT NULL THEN
            PERFORM agentrun_1.settle(NULL, NULL, NULL, NULL, ARRAY[v_merged.id]);
        END IF;
        IF p_budget IS NOT NULL THEN
            SELECT * INTO v_refusal FROM agentrun_1.reserve(ARRAY[p_run], ARRAY[p_user], p_budget);
            IF FOUND THEN
                RAISE EXCEPTION 'budget' USING ERRCODE = 'AR429', DETAIL = v_refusal.scope, HINT = v_refusal.wait;
            END IF;
        END IF;
    END IF;

    -- The run that was superseded stood just below, so that a repeated call finds it too; what it misses, readers find by themselves.
    RETURN QUERY
    SELECT r.id, r.session_id, r.status, r.id = p_run, r.idempotency_key <> p_key,
           r.status = 'pending' AND NOT EXISTS (
               SELECT 1 FROM runs b WHERE b.session_id = r.session_id AND b.session_position < r.session_position
               AND b.status IN ('pending', 'running')),
           false, o.id, o.epoch, a.owner, v.seqs, v.kinds, v.datas
    FROM (
        SELECT * FROM runs x WHERE x.idempotency_key = p_key
        UNION ALL
        SELECT * FROM runs x WHERE p_client_key IS NOT NULL AND x.agent = p_agent AND x.user_id = p_user
            AND x.session_given = p_given AND x.client_key = p_client_key AND x.idempotency_key <> p_key
        LIMIT 1
    ) r
    LEFT JOIN LATERAL (
        SELECT y.id, y.epoch, y.superseded_by FROM runs y
        WHERE r.id = p_run AND y.session_id = r.session_id AND y.session_position < r.session_position
          AND (v_last.id IS NULL OR y.id = v_last.id)
        ORDER BY y.session_position DESC LIMIT 1
    ) o ON o.superseded_by = r.id
    LEFT JOIN attempts a ON a.run_id = o.id AND a.epoch = o.epoch
    LEFT JOIN LATERAL (
        SELECT array_agg(m.seq ORDER BY m.seq) AS seqs, array_agg(m.kind ORDER BY m.seq) AS kinds,
               array_agg(m.data::text ORDER BY m.seq) AS datas
        FROM (SELECT * FROM messages x WHERE x.run_id = o.id ORDER BY x.seq DESC LIMIT 2) m
        WHERE m.epoch = o.epoch AND m.kind IN ('restart', 'superseded')
    ) v ON true;
END $$;

-- follow_up: over the budget nothing is stored, nothing is superseded, and `refused` says why.
CREATE OR REPLACE FUNCTION agentrun_1.follow_up(
    p_run uuid, p_session uuid, p_input uuid, p_agent text, p_user text, p_external text, p_given text,
    p_key text, p_client_key text, p_body_hash text, p_body text, p_content text, p_policy text, p_window double precision,
    p_budget jsonb)
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean, rejected boolean,
               superseded uuid, epoch integer, owner text, event_seq integer[], event_kind text[], event_data text[],
               refused text, wait integer)
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_scope text;
    v_wait text;
BEGIN
    RETURN QUERY SELECT f.*, NULL::text, NULL::integer FROM agentrun_1.follow_up_within(
        p_run, p_session, p_input, p_agent, p_user, p_external, p_given, p_key, p_client_key, p_body_hash, p_body, p_content,
        p_policy, p_window, p_budget) f;
EXCEPTION WHEN SQLSTATE 'AR429' THEN
    GET STACKED DIAGNOSTICS v_scope = PG_EXCEPTION_DETAIL, v_wait = PG_EXCEPTION_HINT;
    RETURN QUERY SELECT NULL::uuid, NULL::uuid, NULL::text, false, false, false, false, NULL::uuid, NULL::integer, NULL::text,
                        NULL::integer[], NULL::text[], NULL::text[], v_scope, v_wait::integer;
END $$;

-- follow_up: what code before schema 4 calls.
CREATE OR REPLACE FUNCTION agentrun_1.follow_up(
    p_run uuid, p_session uuid, p_input uuid, p_agent text, p_user text, p_external text, p_given text,
    p_key text, p_client_key text, p_body_hash text, p_body text, p_content text, p_policy text, p_window double precision)
RETURNS TABLE (run_id uuid, session_id uuid, status text, inserted boolean, reused boolean, is_head boolean, rejected boolean,
               superseded uuid, epoch integer, owner text, event_seq integer[], event_kind text[], event_data text[])
LANGUAGE sql VOLATILE AS $$
    SELECT * FROM agentrun_1.follow_up_within(p_run, p_session, p_input, p_agent, p_user, p_external, p_given, p_key, p_client_key,
                                              p_body_hash, p_body, p_content, p_policy, p_window, NULL)
$$;

-- hold_sessions: makes and locks the sessions of runs that are to be submitted, and locks those of runs that are to be taken over, so that
-- both may be done in one transaction and the order of the locks is kept.
CREATE OR REPLACE FUNCTION agentrun_1.hold_sessions(p_id uuid[], p_agent text[], p_user text[], p_external text[], p_run uuid[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO sessions (id, agent, user_id, external_id)
    SELECT DISTINCT ON (n.agent, n.user_id, n.external_id) n.id, n.agent, n.user_id, n.external_id
    FROM unnest(p_id, p_agent, p_user, p_external) AS n (id, agent, user_id, external_id)
    ORDER BY n.agent, n.user_id, n.external_id ON CONFLICT DO NOTHING;
    PERFORM 1 FROM sessions s
    WHERE s.id IN (SELECT x.id FROM sessions x JOIN unnest(p_agent, p_user, p_external) AS n (agent, user_id, external_id)
                       USING (agent, user_id, external_id)
                   UNION SELECT r.session_id FROM runs r WHERE r.id = ANY (p_run))
    ORDER BY s.id FOR NO KEY UPDATE;
END $$;
