-- Runs, what they were accepted as, their labels, and their numbered events.
-- Times are milliseconds since the Unix epoch, UTC. Ids are `run_` and a uuid v7, so their order is the
-- order of acceptance.

-- The row that is read and written all the time. The two long columns come last, so that reading the
-- others never touches their overflow pages.
CREATE TABLE runs (
    id                  TEXT    NOT NULL PRIMARY KEY,
    tenant              TEXT    NOT NULL,
    generation          INTEGER NOT NULL,
    status              TEXT    NOT NULL,
    agent               TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    limits              TEXT    NOT NULL, -- JSON
    metadata            TEXT    NOT NULL, -- JSON
    steps               INTEGER NOT NULL,
    tool_calls          INTEGER NOT NULL,
    usage               TEXT    NOT NULL, -- JSON
    last_seq            INTEGER NOT NULL,
    created_at          INTEGER NOT NULL,
    started_at          INTEGER,
    deadline_at         INTEGER,
    cancel_requested_at INTEGER,
    finished_at         INTEGER,          -- set exactly when the run has ended
    ending              TEXT,             -- JSON, set together with finished_at
    state               TEXT              -- JSON, the machine's own
) STRICT;

CREATE INDEX runs_by_tenant ON runs (tenant, id);
CREATE INDEX runs_queued ON runs (id) WHERE status = 'queued';
CREATE INDEX runs_running ON runs (id) WHERE status = 'running';

-- Written once, read by a worker when it takes the run.
CREATE TABLE run_specs (
    run  TEXT NOT NULL PRIMARY KEY REFERENCES runs (id) ON DELETE CASCADE,
    spec TEXT NOT NULL -- JSON
) STRICT, WITHOUT ROWID;

-- The log. A body is the exact bytes every reader gets; nothing in the database looks into it.
CREATE TABLE run_events (
    run  TEXT    NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    seq  INTEGER NOT NULL,
    time INTEGER NOT NULL,
    kind TEXT    NOT NULL,
    body BLOB    NOT NULL,
    PRIMARY KEY (run, seq)
) STRICT, WITHOUT ROWID;

-- An index over `runs.metadata`: finds runs by label, newest first.
CREATE TABLE run_metadata (
    tenant TEXT NOT NULL,
    key    TEXT NOT NULL,
    value  TEXT NOT NULL,
    run    TEXT NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, key, value, run)
) STRICT, WITHOUT ROWID;

CREATE INDEX run_metadata_by_run ON run_metadata (run);
