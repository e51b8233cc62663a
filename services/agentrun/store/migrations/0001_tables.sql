-- All tables of agentrun. Times are timestamptz by Postgres' clock, ids are UUIDv7 made by the application, money is numeric.
-- Every foreign key leads an index; every other index serves the query named beside it.

CREATE TABLE meta (
    singleton boolean PRIMARY KEY DEFAULT true CHECK (singleton),
    owner text,                                    -- "<namespace>/<name>" of the one AgentRun that this database belongs to
    oldest_accepted integer NOT NULL               -- the lowest schema version whose code may still run on this schema
);
INSERT INTO meta (oldest_accepted) VALUES (1);

CREATE TABLE sessions (
    id uuid PRIMARY KEY,
    agent text NOT NULL,
    user_id text NOT NULL,
    external_id text NOT NULL,                     -- the caller's name for it; "run:<idempotency key>" for a run without a session
    next_position bigint NOT NULL DEFAULT 0,       -- holes in positions are allowed, so a rolled back submission costs nothing
    metadata jsonb NOT NULL DEFAULT '{}',
    created_at timestamptz NOT NULL DEFAULT now(),
    UNIQUE (agent, user_id, external_id)
);
CREATE INDEX sessions_by_user ON sessions (agent, user_id, id);                       -- list_sessions

CREATE TABLE runs (
    id uuid PRIMARY KEY,
    agent text NOT NULL,
    user_id text NOT NULL,
    session_id uuid NOT NULL REFERENCES sessions,
    session_given text NOT NULL,                   -- the session as the caller gave it, '' if none
    session_position bigint NOT NULL,
    status text NOT NULL DEFAULT 'pending'
        CHECK (status IN ('pending', 'running', 'succeeded', 'failed', 'cancelled', 'superseded')),
    epoch integer NOT NULL DEFAULT 0 CHECK (epoch >= 0),
    idempotency_key text NOT NULL UNIQUE,
    client_key text,                               -- the Idempotency-Key header
    body_hash text NOT NULL,
    input jsonb NOT NULL,
    result jsonb,
    error jsonb,
    not_before timestamptz,                        -- due when null or past
    cron_task uuid,
    slot timestamptz,
    superseded_by uuid,
    redrive_of uuid,
    reserved_usd numeric,
    budget_day date,
    created_at timestamptz NOT NULL DEFAULT now(),
    started_at timestamptz,
    finished_at timestamptz,
    archived_at timestamptz,
    UNIQUE (session_id, session_position)
);
CREATE UNIQUE INDEX runs_client_key ON runs (agent, user_id, session_given, client_key) WHERE client_key IS NOT NULL;
CREATE UNIQUE INDEX runs_one_running ON runs (session_id) WHERE status = 'running';
CREATE INDEX runs_unfinished ON runs (session_id, session_position) WHERE status IN ('pending', 'running');  -- the head
CREATE INDEX runs_pending ON runs (id) WHERE status = 'pending';                      -- due_heads
CREATE INDEX runs_by_user ON runs (agent, user_id, id);                               -- list_runs
CREATE INDEX runs_by_agent ON runs (agent, id);                                       -- list_runs, scope admin

-- The transition table of domain/states.py, enforced for every path, psql included. Only the claim raises the epoch.
CREATE FUNCTION runs_guard() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'INSERT' THEN
        RAISE EXCEPTION 'run %: a run starts as pending at epoch 0', NEW.id USING ERRCODE = 'check_violation';
    END IF;
    IF OLD.status IS DISTINCT FROM NEW.status AND NOT (
        (OLD.status = 'pending' AND NEW.status IN ('running', 'cancelled', 'superseded'))
        OR (OLD.status = 'running' AND NEW.status IN ('pending', 'succeeded', 'failed', 'cancelled', 'superseded'))
    ) THEN
        RAISE EXCEPTION 'run % is % and cannot become %', OLD.id, OLD.status, NEW.status USING ERRCODE = 'check_violation';
    END IF;
    IF NEW.epoch <> OLD.epoch + (OLD.status = 'pending' AND NEW.status = 'running')::integer THEN
        RAISE EXCEPTION 'run %: epoch % cannot become % on the way from % to %',
            OLD.id, OLD.epoch, NEW.epoch, OLD.status, NEW.status USING ERRCODE = 'check_violation';
    END IF;
    RETURN NEW;
END $$;
CREATE TRIGGER runs_guard_update BEFORE UPDATE ON runs FOR EACH ROW
    WHEN (OLD.status IS DISTINCT FROM NEW.status OR OLD.epoch IS DISTINCT FROM NEW.epoch) EXECUTE FUNCTION runs_guard();
CREATE TRIGGER runs_guard_insert BEFORE INSERT ON runs FOR EACH ROW
    WHEN (NEW.status <> 'pending' OR NEW.epoch <> 0) EXECUTE FUNCTION runs_guard();

CREATE TABLE attempts (
    run_id uuid NOT NULL REFERENCES runs,
    epoch integer NOT NULL,
    owner text NOT NULL,                           -- consumer name / a nonce made once per delivered entry
    outcome text NOT NULL DEFAULT 'running'
        CHECK (outcome IN ('running', 'finished', 'retrying', 'lost', 'handed_back', 'interrupted')),
    lease_expires_at timestamptz NOT NULL,
    seq_reserved integer NOT NULL,                 -- the highest event number that may have gone out
    checkpoint jsonb,
    checkpoint_seq integer NOT NULL DEFAULT -1,
    booked_usd numeric NOT NULL DEFAULT 0,
    started_at timestamptz NOT NULL DEFAULT now(),
    ended_at timestamptz,
    PRIMARY KEY (run_id, epoch)
);
CREATE INDEX attempts_lease ON attempts (lease_expires_at) WHERE outcome = 'running'; -- expired

CREATE TABLE messages (
    run_id uuid NOT NULL REFERENCES runs,
    seq integer NOT NULL CHECK (seq >= 0),
    epoch integer NOT NULL,
    kind text NOT NULL,
    data json NOT NULL,                            -- json keeps the very bytes that went to the clients (docs/decisions/0002)
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (run_id, seq)
);

CREATE TABLE inputs (
    id uuid PRIMARY KEY,
    run_id uuid NOT NULL REFERENCES runs,          -- submitted with
    held_by uuid NOT NULL REFERENCES runs,         -- the run that holds it now
    session_id uuid NOT NULL,
    position bigint NOT NULL,
    content jsonb NOT NULL,
    created_at timestamptz NOT NULL DEFAULT now(),
    fate text CHECK (fate IN ('answered_in', 'failed_in', 'cancelled_in')),
    fate_run uuid,
    CHECK ((fate IS NULL) = (fate_run IS NULL))
);
CREATE INDEX inputs_run ON inputs (run_id);
CREATE INDEX inputs_held ON inputs (held_by, position);                               -- history

CREATE TABLE ledger (                              -- append-only; no foreign key, never fenced: the money was spent
    run_id uuid NOT NULL,
    epoch integer NOT NULL,
    call integer NOT NULL,                         -- 0, 1, 2… within the attempt
    at timestamptz NOT NULL DEFAULT now(),
    agent text NOT NULL,
    user_id text NOT NULL,
    session_id uuid NOT NULL,
    cron_task uuid,
    model text NOT NULL,
    input_tokens bigint NOT NULL CHECK (input_tokens >= 0),
    cached_tokens bigint NOT NULL CHECK (cached_tokens >= 0),
    cache_write_tokens bigint NOT NULL CHECK (cache_write_tokens >= 0),
    output_tokens bigint NOT NULL CHECK (output_tokens >= 0),
    reasoning_tokens bigint NOT NULL CHECK (reasoning_tokens >= 0),
    audio_input_tokens bigint NOT NULL CHECK (audio_input_tokens >= 0),
    audio_output_tokens bigint NOT NULL CHECK (audio_output_tokens >= 0),
    cost_usd numeric CHECK (cost_usd >= 0),        -- NULL: no price is known; never 0 instead
    price_id text,
    unmeasured boolean NOT NULL DEFAULT false,     -- the call was cut before its usage came: the counts are an estimate
    PRIMARY KEY (run_id, epoch, call)
);

CREATE TABLE budget_counters (
    scope text NOT NULL,
    day date NOT NULL,
    reserved numeric NOT NULL DEFAULT 0,
    spent numeric NOT NULL DEFAULT 0,
    PRIMARY KEY (scope, day)
);

CREATE TABLE effects (
    chain_id uuid NOT NULL,                        -- the first run of a redrive chain, else the run itself
    name text NOT NULL,
    key text NOT NULL,
    run_id uuid NOT NULL REFERENCES runs,
    epoch integer NOT NULL,
    state text NOT NULL DEFAULT 'initiated' CHECK (state IN ('initiated', 'done', 'failed', 'unknown')),
    request jsonb,
    response jsonb,
    created_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (chain_id, name, key)
);
CREATE INDEX effects_run ON effects (run_id);

CREATE TABLE cron_tasks (
    uid uuid PRIMARY KEY,
    generation bigint NOT NULL,
    spec jsonb NOT NULL,
    slots_from timestamptz NOT NULL,
    deleted_at timestamptz
);
CREATE TABLE slots (
    task uuid NOT NULL REFERENCES cron_tasks,
    slot timestamptz NOT NULL,
    outcome text NOT NULL,
    run_id uuid,
    fired_at timestamptz NOT NULL DEFAULT now(),
    PRIMARY KEY (task, slot)
);

CREATE TABLE dead_letters (
    run_id uuid PRIMARY KEY REFERENCES runs,
    payload jsonb NOT NULL,
    reason text NOT NULL,
    last_error jsonb,
    attempts integer NOT NULL,
    redriven_run_id uuid,
    created_at timestamptz NOT NULL DEFAULT now()
);
