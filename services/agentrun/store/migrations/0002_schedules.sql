-- What the scheduler knows of a CronTask, and why a slot was decided as it was.

ALTER TABLE cron_tasks
    ADD COLUMN decided_through timestamptz,        -- the newest slot that was decided: none up to it is decided again
    ADD COLUMN decided_generation bigint,          -- the generation that next_slot is of
    ADD COLUMN next_slot timestamptz;              -- null: this schedule has no further time

ALTER TABLE slots
    ADD COLUMN detail text,                        -- for people: why it was skipped, or what failed
    ADD CONSTRAINT slots_outcome CHECK (outcome IN ('ran', 'late', 'skipped_overlap', 'skipped_deadline', 'skipped_suspended',
                                                    'skipped_budget', 'failed'));

CREATE INDEX runs_unfinished_of_task ON runs (cron_task)                              -- slots.unfinished, cron_tasks.states
    WHERE cron_task IS NOT NULL AND status IN ('pending', 'running');
