-- Follow-ups and effects. The functions of submissions.sql and effects.sql, and what effects are told apart by.

ALTER TABLE effects
    ADD COLUMN token uuid,                         -- of the call that initiated it: a lost reply is found again
    ADD COLUMN tries integer NOT NULL DEFAULT 1,   -- how often the call may have gone out
    ADD COLUMN settled_at timestamptz;             -- when it became done, failed or unknown
