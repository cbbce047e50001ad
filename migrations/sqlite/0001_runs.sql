-- Runs, what they were accepted as, their labels, and their numbered events.
-- Times are milliseconds since the Unix epoch, UTC. Ids are `run_` and a uuid v7, so their order is the
-- order of acceptance.

-- The row that is read and written all the time. The long columns come last, so that reading the others never
-- touches their overflow pages.
CREATE TABLE runs (
    id                  TEXT    NOT NULL PRIMARY KEY,
    tenant              TEXT    NOT NULL,
    generation          INTEGER NOT NULL,
    status              TEXT    NOT NULL,
    agent               TEXT    NOT NULL,
    model               TEXT    NOT NULL,
    thread              TEXT,             -- the conversation it belongs to
    continues           TEXT,             -- the run whose transcript it goes on from; gone when that was erased
    limits              TEXT    NOT NULL, -- JSON
    metadata            TEXT    NOT NULL, -- JSON
    steps               INTEGER NOT NULL,
    tool_calls          INTEGER NOT NULL,
    usage               TEXT    NOT NULL, -- JSON
    last_seq            INTEGER NOT NULL,
    worker              TEXT,             -- the process that has it at work; NULL when it was let go
    crashes             INTEGER NOT NULL, -- processes in a row that took it over and got nowhere with it
    inbox               INTEGER NOT NULL, -- number of the newest item in run_inbox, 0 before the first
    created_at          INTEGER NOT NULL,
    started_at          INTEGER,
    deadline_at         INTEGER,          -- set while it is at work, and kept at its end
    time_left_ms        INTEGER,          -- set while it is not at work and has been
    waiting_until       INTEGER,          -- set exactly while it waits for answers from outside
    cancel_requested_at INTEGER,
    finished_at         INTEGER,          -- set exactly when the run has ended
    pending             TEXT,             -- JSON, set together with waiting_until
    ending              TEXT,             -- JSON, set together with finished_at
    state               TEXT              -- JSON, the machine's own
) STRICT;

CREATE INDEX runs_by_tenant ON runs (tenant, id);
CREATE INDEX runs_queued ON runs (id) WHERE status = 'queued';
CREATE INDEX runs_running ON runs (id) WHERE status = 'running';
CREATE INDEX runs_waiting ON runs (waiting_until) WHERE status = 'waiting';
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_by_predecessor ON runs (continues) WHERE continues IS NOT NULL;
CREATE INDEX runs_by_thread ON runs (tenant, thread, id) WHERE thread IS NOT NULL;

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

-- What was said to a run while it was active, until the run takes it in.
CREATE TABLE run_inbox (
    run    TEXT    NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    number INTEGER NOT NULL, -- 1, 2, 3, …
    item   TEXT    NOT NULL, -- JSON
    PRIMARY KEY (run, number)
) STRICT, WITHOUT ROWID;

-- Answers that were given under an `Idempotency-Key`. They go with their run.
CREATE TABLE idempotency_keys (
    tenant      TEXT    NOT NULL,
    key         TEXT    NOT NULL,
    fingerprint TEXT    NOT NULL, -- of the request
    run         TEXT    NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    answer      TEXT    NOT NULL, -- JSON
    created_at  INTEGER NOT NULL,
    PRIMARY KEY (tenant, key)
) STRICT, WITHOUT ROWID;

CREATE INDEX idempotency_keys_by_run ON idempotency_keys (run);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

-- Runs whose data was erased: that they were there is all that is kept of them.
CREATE TABLE erased_runs (
    run       TEXT    NOT NULL PRIMARY KEY,
    tenant    TEXT    NOT NULL,
    erased_at INTEGER NOT NULL
) STRICT, WITHOUT ROWID;

CREATE INDEX erased_runs_by_age ON erased_runs (erased_at);
