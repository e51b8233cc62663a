-- What is needed to price calls again, to tell lost attempts apart, and to report from sums instead of from every call. Budgets use
-- runs.reserved_usd, runs.budget_day, attempts.booked_usd and budget_counters, which are there since 0001.

ALTER TABLE ledger
    ADD COLUMN provider text NOT NULL DEFAULT '',  -- with the model, what a price is looked up by
    ADD COLUMN lost boolean NOT NULL DEFAULT false; -- the attempt was lost: paid, and paid again by the next one

CREATE INDEX ledger_unpriced ON ledger (at, run_id, epoch, call) WHERE cost_usd IS NULL;  -- ledger.unpriced

-- Changes of the sums, written with each change of the ledger, folded into the tables below by the scheduler. A report is the sums and
-- the changes that wait, in one snapshot: the full sum at any time. What is deleted from the ledger stays in the sums.
CREATE TABLE usage_changes (
    id bigint GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
    day date NOT NULL,                             -- of ledger.at, in UTC
    agent text NOT NULL,
    user_id text NOT NULL,
    session_id uuid NOT NULL,
    cron_task uuid NOT NULL,                       -- all zeros: none
    model text NOT NULL,
    calls bigint NOT NULL,
    input_tokens numeric NOT NULL,                 -- numeric: sums of bigints have no bound
    cached_tokens numeric NOT NULL,
    cache_write_tokens numeric NOT NULL,
    output_tokens numeric NOT NULL,
    reasoning_tokens numeric NOT NULL,
    audio_input_tokens numeric NOT NULL,
    audio_output_tokens numeric NOT NULL,
    cost_usd numeric NOT NULL,
    unpriced bigint NOT NULL,
    unmeasured bigint NOT NULL,
    lost_calls bigint NOT NULL,
    lost_usd numeric NOT NULL
);

CREATE TABLE usage_daily (
    LIKE usage_changes,
    PRIMARY KEY (day, agent, user_id, cron_task, model)                               -- usage.report
);
ALTER TABLE usage_daily DROP COLUMN id, DROP COLUMN session_id;

CREATE TABLE usage_sessions (
    LIKE usage_changes,
    PRIMARY KEY (day, session_id, agent, user_id, cron_task, model)                   -- usage.report, by session
);
ALTER TABLE usage_sessions DROP COLUMN id;

CREATE FUNCTION ledger_added() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage_changes (day, agent, user_id, session_id, cron_task, model, calls, input_tokens, cached_tokens, cache_write_tokens,
        output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, unpriced, unmeasured, lost_calls, lost_usd)
    SELECT (l.at AT TIME ZONE 'UTC')::date, l.agent, l.user_id, l.session_id,
           coalesce(l.cron_task, '00000000-0000-0000-0000-000000000000'), l.model, count(*), sum(l.input_tokens), sum(l.cached_tokens),
           sum(l.cache_write_tokens), sum(l.output_tokens), sum(l.reasoning_tokens), sum(l.audio_input_tokens), sum(l.audio_output_tokens),
           coalesce(sum(l.cost_usd), 0), count(*) FILTER (WHERE l.cost_usd IS NULL), count(*) FILTER (WHERE l.unmeasured),
           count(*) FILTER (WHERE l.lost), coalesce(sum(l.cost_usd) FILTER (WHERE l.lost), 0)
    FROM new_rows l GROUP BY 1, 2, 3, 4, 5, 6;
    RETURN NULL;
END $$;

-- The same for rows that change: what they are now, less what they were.
CREATE FUNCTION ledger_changed() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO usage_changes (day, agent, user_id, session_id, cron_task, model, calls, input_tokens, cached_tokens, cache_write_tokens,
        output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, unpriced, unmeasured, lost_calls, lost_usd)
    SELECT (l.at AT TIME ZONE 'UTC')::date, l.agent, l.user_id, l.session_id,
           coalesce(l.cron_task, '00000000-0000-0000-0000-000000000000'), l.model, sum(l.sign), sum(l.sign * l.input_tokens),
           sum(l.sign * l.cached_tokens), sum(l.sign * l.cache_write_tokens), sum(l.sign * l.output_tokens),
           sum(l.sign * l.reasoning_tokens), sum(l.sign * l.audio_input_tokens), sum(l.sign * l.audio_output_tokens),
           sum(l.sign * coalesce(l.cost_usd, 0)), coalesce(sum(l.sign) FILTER (WHERE l.cost_usd IS NULL), 0),
           coalesce(sum(l.sign) FILTER (WHERE l.unmeasured), 0), coalesce(sum(l.sign) FILTER (WHERE l.lost), 0),
           coalesce(sum(l.sign * coalesce(l.cost_usd, 0)) FILTER (WHERE l.lost), 0)
    FROM (SELECT 1 AS sign, n.* FROM new_rows n UNION ALL SELECT -1, o.* FROM old_rows o) l GROUP BY 1, 2, 3, 4, 5, 6;
    RETURN NULL;
END $$;

UPDATE ledger l SET lost = true FROM attempts a WHERE a.run_id = l.run_id AND a.epoch = l.epoch AND a.outcome = 'lost';

INSERT INTO usage_changes (day, agent, user_id, session_id, cron_task, model, calls, input_tokens, cached_tokens, cache_write_tokens,
    output_tokens, reasoning_tokens, audio_input_tokens, audio_output_tokens, cost_usd, unpriced, unmeasured, lost_calls, lost_usd)
SELECT (l.at AT TIME ZONE 'UTC')::date, l.agent, l.user_id, l.session_id,
       coalesce(l.cron_task, '00000000-0000-0000-0000-000000000000'), l.model, count(*), sum(l.input_tokens), sum(l.cached_tokens),
       sum(l.cache_write_tokens), sum(l.output_tokens), sum(l.reasoning_tokens), sum(l.audio_input_tokens), sum(l.audio_output_tokens),
       coalesce(sum(l.cost_usd), 0), count(*) FILTER (WHERE l.cost_usd IS NULL), count(*) FILTER (WHERE l.unmeasured),
       count(*) FILTER (WHERE l.lost), coalesce(sum(l.cost_usd) FILTER (WHERE l.lost), 0)
FROM ledger l GROUP BY 1, 2, 3, 4, 5, 6;

CREATE TRIGGER ledger_added AFTER INSERT ON ledger REFERENCING NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_added();
CREATE TRIGGER ledger_changed AFTER UPDATE ON ledger REFERENCING OLD TABLE AS old_rows NEW TABLE AS new_rows
    FOR EACH STATEMENT EXECUTE FUNCTION ledger_changed();
