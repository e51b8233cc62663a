-- Dead letters that are redriven once or discarded, and what retention needs to find old rows. The functions of dead_letters.sql and
-- retention.sql.

ALTER TABLE dead_letters
    ADD COLUMN redriven_at timestamptz,
    ADD COLUMN discarded_at timestamptz,           -- a person has decided that nothing more is to be done
    ADD CONSTRAINT dead_letters_one_end CHECK (redriven_run_id IS NULL OR discarded_at IS NULL);
CREATE INDEX dead_letters_open ON dead_letters (run_id)                               -- dead_letters.list_letters, count_open
    WHERE redriven_run_id IS NULL AND discarded_at IS NULL;

CREATE UNIQUE INDEX runs_redrive_of ON runs (redrive_of) WHERE redrive_of IS NOT NULL; -- a run is redriven once; retention

CREATE INDEX effects_unsettled ON effects (run_id) WHERE state IN ('initiated', 'unknown'); -- effects.unsettled

CREATE INDEX runs_to_archive ON runs (finished_at) WHERE archived_at IS NULL AND finished_at IS NOT NULL;  -- retention.archive
CREATE INDEX runs_to_delete ON runs (finished_at, id) WHERE archived_at IS NOT NULL;   -- retention.delete_runs
CREATE INDEX ledger_by_time ON ledger (at);                                            -- retention.delete_ledger
-- Rows come and go here all the time: what is free is to be used again long before a fifth of the table is dead.
ALTER TABLE messages SET (autovacuum_vacuum_scale_factor = 0.02);

-- Of an expression that only admins' queries have: an index on the name itself could be taken for a user's session too, however many users
-- have one of that name.
CREATE INDEX sessions_by_name ON sessions (hashtextextended(external_id, 0));          -- sessions.named, list_runs, scope admin
