-- redrive: a new run that does again what a dead letter's run could not, last in its session, with copies of the inputs. However often it is
-- asked for there is one: its idempotency key is made of the old run's id, and runs_redrive_of allows no second. The old run stays failed.
-- No row: there is no such dead letter. `discarded`: it was given up, and nothing is stored. With p_budget a new run reserves what it may cost;
-- if that does not fit, nothing is stored and `refused` says why.
-- p_inputs: as many new ids as the old run holds inputs, in ascending order.
CREATE OR REPLACE FUNCTION agentrun_1.redrive(p_letter uuid, p_run uuid, p_inputs uuid[], p_budget jsonb)
RETURNS TABLE (run_id uuid, session_id uuid, external_id text, status text, inserted boolean, is_head boolean, discarded boolean,
               refused text, wait integer)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_old runs;
    v_session sessions;
    v_letter dead_letters;
    v_refusal record;
    v_made integer;
BEGIN
    SELECT * INTO v_old FROM runs r WHERE r.id = p_letter;
    SELECT * INTO v_session FROM sessions s WHERE s.id = v_old.session_id FOR NO KEY UPDATE;
    SELECT * INTO v_letter FROM dead_letters d WHERE d.run_id = p_letter FOR NO KEY UPDATE;
    IF NOT FOUND THEN RETURN; END IF;
    IF v_letter.discarded_at IS NOT NULL THEN
        RETURN QUERY SELECT v_old.id, v_session.id, v_session.external_id, v_old.status, false, false, true,
                            NULL::text, NULL::integer;
        RETURN;
    END IF;

    INSERT INTO runs (id, agent, user_id, session_id, session_given, session_position, idempotency_key, body_hash, input,
                      cron_task, redrive_of, reserved_usd, budget_day)
    VALUES (p_run, v_old.agent, v_old.user_id, v_old.session_id, v_old.session_given, v_session.next_position,
            'redrive:' || p_letter, v_old.body_hash, v_old.input, v_old.cron_task, p_letter,
            (p_budget ->> 'run')::numeric, agentrun_1.budget_day(p_budget))
    ON CONFLICT DO NOTHING;
    GET DIAGNOSTICS v_made = ROW_COUNT;
    IF v_made = 1 AND p_budget IS NOT NULL THEN
        SELECT * INTO v_refusal FROM agentrun_1.reserve(ARRAY[p_run], ARRAY[v_old.user_id], p_budget);
        IF FOUND THEN
            DELETE FROM runs r WHERE r.id = p_run;
            RETURN QUERY SELECT v_old.id, v_session.id, v_session.external_id, v_old.status, false, false, false,
                                v_refusal.scope::text, v_refusal.wait::integer;
            RETURN;
        END IF;
    END IF;
    IF v_made = 1 THEN
        UPDATE sessions s SET next_position = s.next_position + 1 WHERE s.id = v_session.id;
        INSERT INTO inputs (id, run_id, held_by, session_id, position, content)
        SELECT n.id, p_run, p_run, v_session.id, v_session.next_position, o.content
        FROM (SELECT i.content, row_number() OVER (ORDER BY i.position, i.id) AS place FROM inputs i WHERE i.held_by = p_letter) o
        JOIN unnest(p_inputs) WITH ORDINALITY AS n (id, place) USING (place);
        UPDATE dead_letters d SET redriven_run_id = p_run, redriven_at = clock_timestamp() WHERE d.run_id = p_letter;
    END IF;

    RETURN QUERY
    SELECT r.id, r.session_id, v_session.external_id, r.status, r.id = p_run,
           r.status = 'pending' AND NOT EXISTS (
               SELECT 1 FROM runs b WHERE b.session_id = r.session_id AND b.session_position < r.session_position
               AND b.status IN ('pending', 'running')), false, NULL::text, NULL::integer
    FROM runs r WHERE r.redrive_of = p_letter;
END $$;
