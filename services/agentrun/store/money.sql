-- The ledger and the budgets: what was spent is booked whoever owns the run by now, and every change of it is counted in the transaction
-- that makes it.
--
-- Invariants, at every commit, for each scope ('agent', 'user:<id>') and day:
--   counters.spent    = sum of the ledger over the runs that were admitted on that day under a day's limit
--   counters.reserved = sum over those of them that have not ended of greatest(reserved_usd - booked_usd, 0)
-- A run keeps its day. booked_usd of its last attempt is what all its attempts have spent; whoever changes it, copies it or ends the run
-- holds that attempt's row.

-- Before the first release the answers of these two had other names, which CREATE OR REPLACE cannot change.
DO $$ BEGIN
    IF EXISTS (SELECT 1 FROM pg_proc WHERE pronamespace = 'agentrun_1'::regnamespace AND proname IN ('book_calls', 'correct_calls')
               AND 'costs' = ANY (proargnames)) THEN
        DROP FUNCTION IF EXISTS agentrun_1.book_calls(jsonb);
        DROP FUNCTION IF EXISTS agentrun_1.correct_calls(jsonb);
    END IF;
END $$;

-- book: new ledger rows. The same call reported again is one row; answers what was new, for settle. Comes first in a transaction, since
-- two reports of one call wait for each other here.
CREATE OR REPLACE FUNCTION agentrun_1.book_calls(p_ledger jsonb, OUT b_run uuid[], OUT b_epoch integer[], OUT b_cost numeric[])
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    WITH x AS (
        SELECT DISTINCT ON (x.run_id, x.epoch, x.call) x.*
        FROM jsonb_to_recordset(p_ledger) AS x (run_id uuid, epoch integer, call integer, model text, provider text, input_tokens bigint,
            cached_tokens bigint, cache_write_tokens bigint, output_tokens bigint, reasoning_tokens bigint, audio_input_tokens bigint,
            audio_output_tokens bigint, cost_usd numeric, price_id text, unmeasured boolean)
        ORDER BY x.run_id, x.epoch, x.call, x.unmeasured
    ), made AS (
        INSERT INTO ledger (run_id, epoch, call, agent, user_id, session_id, cron_task, model, provider, input_tokens, cached_tokens,
            cache_write_tokens, output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, price_id, unmeasured)
        SELECT x.run_id, x.epoch, x.call, r.agent, r.user_id, r.session_id, r.cron_task, x.model, coalesce(x.provider, ''),
            x.input_tokens, x.cached_tokens, x.cache_write_tokens, x.output_tokens, x.reasoning_tokens, x.audio_input_tokens,
            x.audio_output_tokens, x.cost_usd, x.price_id, x.unmeasured
        FROM x JOIN runs r ON r.id = x.run_id
        ORDER BY x.run_id, x.epoch, x.call
        ON CONFLICT DO NOTHING RETURNING run_id, epoch, coalesce(cost_usd, 0) AS cost
    )
    SELECT array_agg(made.run_id), array_agg(made.epoch), array_agg(made.cost) INTO b_run, b_epoch, b_cost FROM made;
END $$;

-- correct: estimates for which the real figures have come are replaced, not added to. Answers by how much the cost has changed. The
-- caller holds the attempts.
CREATE OR REPLACE FUNCTION agentrun_1.correct_calls(p_ledger jsonb, OUT b_run uuid[], OUT b_epoch integer[], OUT b_cost numeric[])
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    WITH x AS (
        SELECT * FROM jsonb_to_recordset(p_ledger) AS x (run_id uuid, epoch integer, call integer, model text, provider text,
            input_tokens bigint, cached_tokens bigint, cache_write_tokens bigint, output_tokens bigint, reasoning_tokens bigint,
            audio_input_tokens bigint, audio_output_tokens bigint, cost_usd numeric, price_id text, unmeasured boolean)
        WHERE NOT x.unmeasured
    ), old AS (
        SELECT l.run_id, l.epoch, l.call, coalesce(l.cost_usd, 0) AS cost FROM ledger l JOIN x USING (run_id, epoch, call)
        WHERE l.unmeasured ORDER BY l.run_id, l.epoch, l.call FOR NO KEY UPDATE OF l
    ), made AS (
        UPDATE ledger l SET model = x.model, provider = coalesce(x.provider, ''), input_tokens = x.input_tokens,
            cached_tokens = x.cached_tokens, cache_write_tokens = x.cache_write_tokens, output_tokens = x.output_tokens,
            reasoning_tokens = x.reasoning_tokens, audio_input_tokens = x.audio_input_tokens,
            audio_output_tokens = x.audio_output_tokens, cost_usd = x.cost_usd, price_id = x.price_id, unmeasured = false
        FROM x JOIN old USING (run_id, epoch, call)
        WHERE l.run_id = x.run_id AND l.epoch = x.epoch AND l.call = x.call
        RETURNING l.run_id, l.epoch, coalesce(l.cost_usd, 0) - old.cost AS cost
    )
    SELECT array_agg(made.run_id), array_agg(made.epoch), array_agg(made.cost) INTO b_run, b_epoch, b_cost FROM made;
END $$;

-- hold_counters: makes counters and locks them, in their order. After it a transaction locks nothing that it does not hold.
CREATE OR REPLACE FUNCTION agentrun_1.hold_counters(p_scope text[], p_day date[]) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
BEGIN
    INSERT INTO budget_counters (scope, day) SELECT DISTINCT * FROM unnest(p_scope, p_day) ORDER BY 1, 2 ON CONFLICT DO NOTHING;
    PERFORM 1 FROM budget_counters c JOIN (SELECT DISTINCT * FROM unnest(p_scope, p_day)) AS n (scope, day) USING (scope, day)
        ORDER BY c.scope, c.day FOR NO KEY UPDATE OF c;
END $$;

-- hold_replaced: locks runs that are to be taken over for new ones of p_user, their attempts, and the counters of both, in the order of the
-- locks. Without it such a transaction would hold the counters of the old runs' days when it takes those of the new ones' day.
CREATE OR REPLACE FUNCTION agentrun_1.hold_replaced(p_run uuid[], p_user text, p_budget jsonb) RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_scopes text[];
    v_days date[];
BEGIN
    PERFORM 1 FROM runs WHERE id = ANY (p_run) ORDER BY id FOR NO KEY UPDATE;
    PERFORM 1 FROM attempts a JOIN runs r ON r.id = a.run_id AND r.epoch = a.epoch WHERE r.id = ANY (p_run)
        ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a;
    SELECT array_agg(v.scope), array_agg(n.day) INTO v_scopes, v_days FROM (
        SELECT p_user AS user_id, agentrun_1.budget_day(p_budget) AS day
        UNION SELECT r.user_id, r.budget_day FROM runs r WHERE r.id = ANY (p_run) AND r.reserved_usd IS NOT NULL
    ) n CROSS JOIN LATERAL (VALUES ('agent'), ('user:' || n.user_id)) AS v (scope);
    PERFORM agentrun_1.hold_counters(v_scopes, v_days);
END $$;

-- settle: counts what was added to the ledger (p_run, p_epoch, p_cost, one for each change), and gives back what runs that this very
-- transaction has ended have not spent. Comes last. The caller holds the attempts of the calls and the later ones, and the last ones of p_ended.
CREATE OR REPLACE FUNCTION agentrun_1.settle(p_ledger jsonb, p_run uuid[], p_epoch integer[], p_cost numeric[], p_ended uuid[])
RETURNS void
LANGUAGE plpgsql VOLATILE AS $$
DECLARE
    v_fixed record;
    v_later integer := 0;
    v_before integer;
BEGIN
    IF p_ledger IS NOT NULL THEN
        IF coalesce(cardinality(p_run), 0) < jsonb_array_length(p_ledger) THEN
            SELECT * INTO v_fixed FROM agentrun_1.correct_calls(p_ledger);
            p_run := p_run || v_fixed.b_run;
            p_epoch := p_epoch || v_fixed.b_epoch;
            p_cost := p_cost || v_fixed.b_cost;
        END IF;
        -- a call that came after its attempt's end: later attempts have copied booked_usd (the caller holds them), and those that were
        -- claimed while it waited are held here
        WHILE EXISTS (SELECT 1 FROM unnest(p_run, p_epoch) AS n (id, epoch) JOIN runs r ON r.id = n.id AND r.epoch > n.epoch) LOOP
            v_before := v_later;
            PERFORM 1 FROM attempts a
                JOIN (SELECT n.id, min(n.epoch) AS epoch FROM unnest(p_run, p_epoch) AS n (id, epoch) GROUP BY 1) n
                    ON n.id = a.run_id AND a.epoch > n.epoch
                ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a;
            GET DIAGNOSTICS v_later = ROW_COUNT;
            EXIT WHEN v_later = v_before;
        END LOOP;
        IF EXISTS (SELECT 1 FROM attempts a JOIN unnest(p_run, p_epoch) AS n (run_id, epoch) USING (run_id, epoch)
                   WHERE a.outcome = 'lost') THEN
            UPDATE ledger l SET lost = true FROM attempts a JOIN unnest(p_run, p_epoch) AS n (run_id, epoch) USING (run_id, epoch)
            WHERE a.outcome = 'lost' AND l.run_id = a.run_id AND l.epoch = a.epoch AND NOT l.lost;
        END IF;
    END IF;
    IF EXISTS (SELECT 1 FROM unnest(p_cost) AS c WHERE c <> 0) THEN
        UPDATE attempts a SET booked_usd = a.booked_usd + s.cost
        FROM (SELECT b.run_id, b.epoch, sum(n.cost) AS cost FROM unnest(p_run, p_epoch, p_cost) AS n (id, epoch, cost)
              JOIN attempts b ON b.run_id = n.id AND b.epoch >= n.epoch GROUP BY 1, 2) s
        WHERE a.run_id = s.run_id AND a.epoch = s.epoch;
    END IF;

    IF NOT EXISTS (SELECT 1 FROM runs r WHERE r.id = ANY (p_run || p_ended) AND r.reserved_usd IS NOT NULL) THEN RETURN; END IF;
    WITH spent AS (
        SELECT id, sum(cost) AS cost FROM unnest(p_run, p_cost) AS n (id, cost) GROUP BY 1
    ), touched AS (
        SELECT id FROM spent UNION SELECT unnest(p_ended)
    ), d AS (
        SELECT r.user_id, r.budget_day AS day, coalesce(spent.cost, 0) AS spent, r.reserved_usd AS reserved,
               coalesce(a.booked_usd, 0) AS booked, coalesce(r.id = ANY (p_ended), false) AS ends,
               r.status NOT IN ('pending', 'running') AS ended
        FROM touched JOIN runs r ON r.id = touched.id LEFT JOIN spent ON spent.id = r.id
        LEFT JOIN LATERAL (SELECT x.booked_usd FROM attempts x WHERE x.run_id = r.id ORDER BY x.epoch DESC LIMIT 1) a ON true
        WHERE r.reserved_usd IS NOT NULL
    ), s AS (
        SELECT scope, d.day, sum(d.spent) AS spent,
               sum(CASE WHEN d.ended AND NOT d.ends THEN 0
                        ELSE greatest(d.reserved - d.booked, 0) * d.ended::integer
                             + greatest(d.reserved - d.booked + d.spent, 0) - greatest(d.reserved - d.booked, 0) END) AS released
        FROM d CROSS JOIN LATERAL (VALUES ('agent'), ('user:' || d.user_id)) AS v (scope) GROUP BY 1, 2
    ), locked AS (
        SELECT c.scope, c.day FROM budget_counters c JOIN s USING (scope, day) ORDER BY c.scope, c.day FOR NO KEY UPDATE OF c
    )
    UPDATE budget_counters c SET spent = c.spent + s.spent, reserved = c.reserved - s.released
    FROM locked JOIN s USING (scope, day) WHERE c.scope = s.scope AND c.day = s.day;
END $$;

-- budget_day: the day on which a run counts that is admitted now.
CREATE OR REPLACE FUNCTION agentrun_1.budget_day(p_budget jsonb) RETURNS date
LANGUAGE sql STABLE AS $$
    SELECT (now() AT TIME ZONE (p_budget ->> 'zone'))::date
$$;

-- reserve: sets aside what new runs may cost, first come, first served; answers the runs that do not fit, why, and after how many seconds
-- it may be worth while to ask again. The caller takes those runs back. Comes last, as settle does.
CREATE OR REPLACE FUNCTION agentrun_1.reserve(p_run uuid[], p_user text[], p_budget jsonb)
RETURNS TABLE (run_id uuid, scope text, wait integer)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_day date := agentrun_1.budget_day(p_budget);
    v_each numeric := (p_budget ->> 'run')::numeric;
    v_all numeric := (p_budget ->> 'day')::numeric;
    v_one numeric := (p_budget ->> 'user_day')::numeric;
    v_scopes text[] := 'agent'::text || ARRAY(SELECT DISTINCT 'user:' || u FROM unnest(p_user) AS u);
    v_night integer := ceil(extract(epoch FROM (v_day + 1)::timestamp AT TIME ZONE (p_budget ->> 'zone') - now()));
BEGIN
    PERFORM agentrun_1.hold_counters(v_scopes, array_fill(v_day, ARRAY[cardinality(v_scopes)]));
    RETURN QUERY
    WITH n AS (
        SELECT t.id, t.ord, 'user:' || t.user_id AS scope, row_number() OVER (PARTITION BY t.user_id ORDER BY t.ord) AS nth
        FROM unnest(p_run, p_user) WITH ORDINALITY AS t (id, user_id, ord)
    ), u AS (
        SELECT n.*, c.spent + v_each > v_one AS user_spent,
               coalesce(c.spent + c.reserved + n.nth * v_each <= v_one, true) AS user_fits
        FROM n JOIN budget_counters c ON c.scope = n.scope AND c.day = v_day
    ), a AS (
        SELECT u.*, c.spent + v_each > v_all AS all_spent, coalesce(c.spent + c.reserved
               + count(*) FILTER (WHERE u.user_fits) OVER (ORDER BY u.ord) * v_each <= v_all, true) AS all_fits
        FROM u JOIN budget_counters c ON c.scope = 'agent' AND c.day = v_day
    ), s AS (
        SELECT v.scope, count(*) AS runs FROM a CROSS JOIN LATERAL (VALUES ('agent'), (a.scope)) AS v (scope)
        WHERE a.user_fits AND a.all_fits GROUP BY 1
    ), counted AS (
        UPDATE budget_counters c SET reserved = c.reserved + s.runs * v_each FROM s WHERE c.scope = s.scope AND c.day = v_day
    )
    SELECT a.id, CASE WHEN a.user_fits THEN 'agent' ELSE 'user' END,
           CASE WHEN a.all_spent OR a.user_spent THEN greatest(v_night, 1) ELSE least(greatest(v_night, 1), 30) END
    FROM a WHERE NOT (a.user_fits AND a.all_fits);
END $$;

-- reprice: gives calls a price that had none. Whoever was faster has won; what was spent is counted as if it had been known at once.
CREATE OR REPLACE FUNCTION agentrun_1.reprice(p_run uuid[], p_epoch integer[], p_call integer[], p_cost numeric[], p_price text[])
RETURNS TABLE (priced bigint, cost_usd numeric)
LANGUAGE plpgsql VOLATILE AS $$
#variable_conflict use_column
DECLARE
    v_runs uuid[];
    v_epochs integer[];
    v_costs numeric[];
BEGIN
    PERFORM 1 FROM attempts a
        JOIN (SELECT n.id, min(n.epoch) AS epoch FROM unnest(p_run, p_epoch) AS n (id, epoch) GROUP BY 1) n
            ON n.id = a.run_id AND a.epoch >= n.epoch
        ORDER BY a.run_id, a.epoch FOR NO KEY UPDATE OF a;
    WITH n AS (
        SELECT * FROM unnest(p_run, p_epoch, p_call, p_cost, p_price) AS t (run_id, epoch, call, cost, price)
    ), locked AS (
        SELECT l.run_id, l.epoch, l.call FROM ledger l JOIN n USING (run_id, epoch, call)
        WHERE l.cost_usd IS NULL ORDER BY l.run_id, l.epoch, l.call FOR NO KEY UPDATE OF l
    ), moved AS (
        UPDATE ledger l SET cost_usd = n.cost, price_id = n.price FROM n JOIN locked USING (run_id, epoch, call)
        WHERE l.run_id = n.run_id AND l.epoch = n.epoch AND l.call = n.call AND l.cost_usd IS NULL
        RETURNING l.run_id, l.epoch, l.cost_usd
    )
    SELECT array_agg(run_id), array_agg(epoch), array_agg(cost_usd) INTO v_runs, v_epochs, v_costs FROM moved;
    PERFORM agentrun_1.settle('[]', v_runs, v_epochs, v_costs, NULL);
    RETURN QUERY SELECT count(*), coalesce(sum(c), 0) FROM unnest(v_costs) AS c;
END $$;

DROP FUNCTION IF EXISTS agentrun_1.book(jsonb);    -- book_calls and settle since schema 4
