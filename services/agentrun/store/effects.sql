-- Effects: what an agent does to the world, on record before it is done. initiated -> done | failed | unknown; failed -> initiated, since
-- nothing has happened. Each write is fenced by its attempt, whose row stays locked to the end of the transaction.

-- hold_attempts: locks those of these attempts that still run, so that nobody ends them before this transaction has. Arrays in the order
-- asked: whether the attempt is held, and the chain that its effects belong to.
CREATE OR REPLACE FUNCTION agentrun_1.hold_attempts(p_run uuid[], p_epoch integer[], OUT held boolean[], OUT chains uuid[])
LANGUAGE sql VOLATILE AS $$
    WITH n AS (
        SELECT * FROM unnest(p_run, p_epoch) WITH ORDINALITY AS t (run_id, epoch, ord)
    ), locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN (SELECT DISTINCT n.run_id, n.epoch FROM n) d USING (run_id, epoch)
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    )
    SELECT array_agg(locked.run_id IS NOT NULL ORDER BY n.ord), array_agg(agentrun_1.chain_of(n.run_id) ORDER BY n.ord)
    FROM n LEFT JOIN locked ON locked.run_id = n.run_id AND locked.epoch = n.epoch
$$;

-- begin_effects: records that a call is about to go out. `mine`: it may go out now; the row was made, or made initiated again, by this very
-- call (its token), also if an earlier try of it lost its reply. Else the row tells what is known. An effect that was initiated and not
-- settled is initiated again only if `again` says so: whoever asks has decided that it may be repeated.
CREATE OR REPLACE FUNCTION agentrun_1.begin_effects(
    p_run uuid[], p_epoch integer[], p_token uuid[], p_name text[], p_key text[], p_request text[], p_again boolean[])
RETURNS TABLE (held boolean, mine boolean, chain_id uuid, state text, tries integer, request text, response text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_held boolean[];
    v_chains uuid[];
BEGIN
    SELECT h.held, h.chains INTO v_held, v_chains FROM agentrun_1.hold_attempts(p_run, p_epoch) h;

    INSERT INTO effects (chain_id, name, key, run_id, epoch, token, request)
    SELECT n.chain_id, n.name, n.key, n.run_id, n.epoch, n.token, n.request::jsonb
    FROM unnest(v_held, v_chains, p_run, p_epoch, p_token, p_name, p_key, p_request)
         AS n (held, chain_id, run_id, epoch, token, name, key, request)
    WHERE n.held ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING;

    WITH n AS (
        SELECT * FROM unnest(v_held, v_chains, p_run, p_epoch, p_token, p_name, p_key, p_request, p_again)
             AS t (held, chain_id, run_id, epoch, token, name, key, request, again)
        WHERE t.held
    ), locked AS (
        SELECT e.chain_id, e.name, e.key FROM effects e JOIN n USING (chain_id, name, key)
        WHERE e.token IS DISTINCT FROM n.token AND (e.state = 'failed' OR (e.state = 'initiated' AND n.again))
          AND e.request IS NOT DISTINCT FROM n.request::jsonb
        ORDER BY e.chain_id, e.name, e.key FOR NO KEY UPDATE OF e
    )
    UPDATE effects e SET state = 'initiated', run_id = n.run_id, epoch = n.epoch, token = n.token, tries = e.tries + 1,
           response = NULL, settled_at = NULL
    FROM n JOIN locked USING (chain_id, name, key) WHERE e.chain_id = n.chain_id AND e.name = n.name AND e.key = n.key;

    RETURN QUERY
    SELECT n.held, coalesce(n.held AND e.state = 'initiated' AND e.token = n.token, false),
           e.chain_id, e.state, e.tries, e.request::text, e.response::text
    FROM unnest(v_held, v_chains, p_token, p_name, p_key) WITH ORDINALITY AS n (held, chain_id, token, name, key, ord)
    LEFT JOIN effects e ON e.chain_id = n.chain_id AND e.name = n.name AND e.key = n.key
    ORDER BY n.ord;
END $$;

-- settle_effects: what came of calls. ok: settled so, now or by an earlier try whose reply was lost. Only what is initiated is settled.
CREATE OR REPLACE FUNCTION agentrun_1.settle_effects(
    p_run uuid[], p_epoch integer[], p_name text[], p_key text[], p_state text[], p_response text[])
RETURNS TABLE (held boolean, ok boolean)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_held boolean[];
    v_chains uuid[];
BEGIN
    SELECT h.held, h.chains INTO v_held, v_chains FROM agentrun_1.hold_attempts(p_run, p_epoch) h;

    WITH n AS (
        SELECT * FROM unnest(v_held, v_chains, p_name, p_key, p_state, p_response) AS t (held, chain_id, name, key, state, response)
        WHERE t.held
    ), locked AS (
        SELECT e.chain_id, e.name, e.key FROM effects e JOIN n USING (chain_id, name, key)
        WHERE e.state = 'initiated' ORDER BY e.chain_id, e.name, e.key FOR NO KEY UPDATE OF e
    )
    UPDATE effects e SET state = n.state, response = n.response::jsonb, settled_at = clock_timestamp()
    FROM n JOIN locked USING (chain_id, name, key) WHERE e.chain_id = n.chain_id AND e.name = n.name AND e.key = n.key;

    RETURN QUERY
    SELECT n.held, coalesce(n.held AND e.state = n.state, false)
    FROM unnest(v_held, v_chains, p_name, p_key, p_state) WITH ORDINALITY AS n (held, chain_id, name, key, state, ord)
    LEFT JOIN effects e ON e.chain_id = n.chain_id AND e.name = n.name AND e.key = n.key
    ORDER BY n.ord;
END $$;
