-- Effects: what an agent does to the world, on record before it is done. initiated -> done | failed | unknown; failed -> initiated, since
-- nothing has happened. Each write is fenced by its attempt, whose row stays locked to the end of the transaction.

-- begin_effects: records that a call is about to go out. `mine`: it may go out now; the row was made, or made initiated again, by this very
-- call (its token), also if an earlier try of it lost its reply. Else the row tells what is known. An effect that was initiated and not
-- settled is initiated again only if `again` says so: whoever asks has decided that it may be repeated.
CREATE OR REPLACE FUNCTION agentrun_1.begin_effects(
    p_run uuid[], p_epoch integer[], p_token uuid[], p_name text[], p_key text[], p_request text[], p_again boolean[])
RETURNS TABLE (held boolean, mine boolean, chain_id uuid, state text, tries integer, request text, response text)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_fenced uuid[];
BEGIN
    WITH locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN (SELECT DISTINCT * FROM unnest(p_run, p_epoch) AS t (run_id, epoch)) n USING (run_id, epoch)
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    ), fenced AS (
        UPDATE attempts a SET seq_reserved = a.seq_reserved FROM locked
        WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch
    ), made AS (
        INSERT INTO effects (chain_id, name, key, run_id, epoch, token, request)
        SELECT agentrun_1.chain_of(n.run_id), n.name, n.key, n.run_id, n.epoch, n.token, n.request::jsonb
        FROM unnest(p_run, p_epoch, p_token, p_name, p_key, p_request) AS n (run_id, epoch, token, name, key, request)
        JOIN fenced f ON f.run_id = n.run_id AND f.epoch = n.epoch
        ORDER BY 1, 2, 3 ON CONFLICT DO NOTHING
    )
    SELECT array_agg(fenced.run_id) INTO v_fenced FROM fenced;

    WITH n AS (
        SELECT agentrun_1.chain_of(t.run_id) AS chain_id, t.*
        FROM unnest(p_run, p_epoch, p_token, p_name, p_key, p_request, p_again) AS t (run_id, epoch, token, name, key, request, again)
        WHERE t.run_id = ANY (v_fenced)
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
    SELECT coalesce(n.run_id = ANY (v_fenced), false),
           coalesce(n.run_id = ANY (v_fenced) AND e.state = 'initiated' AND e.token = n.token, false),
           e.chain_id, e.state, e.tries, e.request::text, e.response::text
    FROM unnest(p_run, p_token, p_name, p_key) WITH ORDINALITY AS n (run_id, token, name, key, ord)
    LEFT JOIN effects e ON e.chain_id = agentrun_1.chain_of(n.run_id) AND e.name = n.name AND e.key = n.key
    ORDER BY n.ord;
END $$;

-- settle_effects: what came of calls. ok: settled so, now or by an earlier try whose reply was lost. Only what is initiated is settled.
CREATE OR REPLACE FUNCTION agentrun_1.settle_effects(
    p_run uuid[], p_epoch integer[], p_name text[], p_key text[], p_state text[], p_response text[])
RETURNS TABLE (held boolean, ok boolean)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_fenced uuid[];
BEGIN
    WITH locked AS (
        SELECT a.run_id, a.epoch FROM attempts a JOIN (SELECT DISTINCT * FROM unnest(p_run, p_epoch) AS t (run_id, epoch)) n USING (run_id, epoch)
        WHERE a.outcome = 'running' ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a
    ), fenced AS (
        UPDATE attempts a SET seq_reserved = a.seq_reserved FROM locked
        WHERE a.run_id = locked.run_id AND a.epoch = locked.epoch AND a.outcome = 'running' RETURNING a.run_id, a.epoch
    ), n AS (
        SELECT agentrun_1.chain_of(t.run_id) AS chain_id, t.name, t.key, t.state, t.response
        FROM unnest(p_run, p_epoch, p_name, p_key, p_state, p_response) AS t (run_id, epoch, name, key, state, response)
        JOIN fenced f ON f.run_id = t.run_id AND f.epoch = t.epoch
    ), effect AS (
        SELECT e.chain_id, e.name, e.key FROM effects e JOIN n USING (chain_id, name, key)
        WHERE e.state = 'initiated' ORDER BY e.chain_id, e.name, e.key FOR NO KEY UPDATE OF e
    ), settled AS (
        UPDATE effects e SET state = n.state, response = n.response::jsonb, settled_at = clock_timestamp()
        FROM n JOIN effect USING (chain_id, name, key)
        WHERE e.chain_id = n.chain_id AND e.name = n.name AND e.key = n.key
    )
    SELECT array_agg(fenced.run_id) INTO v_fenced FROM fenced;

    RETURN QUERY
    SELECT coalesce(n.run_id = ANY (v_fenced), false), coalesce(n.run_id = ANY (v_fenced) AND e.state = n.state, false)
    FROM unnest(p_run, p_name, p_key, p_state) WITH ORDINALITY AS n (run_id, name, key, state, ord)
    LEFT JOIN effects e ON e.chain_id = agentrun_1.chain_of(n.run_id) AND e.name = n.name AND e.key = n.key
    ORDER BY n.ord;
END $$;
