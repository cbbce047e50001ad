-- Runs, what they were accepted as, their labels, and their numbered events.
-- Times are milliseconds since the Unix epoch, UTC. Ids are `run_` and a uuid v7, so their order is the
-- order of acceptance; they are compared byte by byte, whatever the language of the database.
-- Text that callers give may hold a character that this database cannot: it stands for itself in SQLite, and is
-- escaped here (see src/store/postgres/text.rs).

-- The row that is written all the time. Room is left on its pages for its next version, so that a step touches no
-- index.
CREATE TABLE runs (
    id                  TEXT   COLLATE "C" NOT NULL PRIMARY KEY,
    tenant              TEXT   NOT NULL,
    generation          BIGINT NOT NULL,
    status              TEXT   NOT NULL,
    agent               TEXT   NOT NULL,
    model               TEXT   NOT NULL,
    thread              TEXT,            -- the conversation it belongs to
    continues           TEXT   COLLATE "C", -- the run whose transcript it goes on from; may name an erased one
    limits              TEXT   NOT NULL, -- JSON
    metadata            TEXT   NOT NULL, -- JSON
    steps               BIGINT NOT NULL,
    tool_calls          BIGINT NOT NULL,
    usage               TEXT   NOT NULL, -- JSON
    last_seq            BIGINT NOT NULL,
    worker              TEXT,            -- the process that has it at work; NULL when it was let go
    crashes             BIGINT NOT NULL, -- processes in a row that took it over and got nowhere with it
    inbox               BIGINT NOT NULL, -- number of the newest item in run_inbox, 0 before the first
    created_at          BIGINT NOT NULL,
    started_at          BIGINT,
    deadline_at         BIGINT,          -- set while it is at work, and kept at its end
    time_left_ms        BIGINT,          -- set while it is not at work and has been
    waiting_until       BIGINT,          -- set exactly while it waits for answers from outside
    cancel_requested_at BIGINT,
    finished_at         BIGINT,          -- set exactly when the run has ended
    pending             TEXT,            -- JSON, set together with waiting_until
    ending              TEXT,            -- JSON, set together with finished_at
    state               TEXT             -- JSON, the machine's own
) WITH (fillfactor = 70);

CREATE INDEX runs_by_tenant ON runs (tenant, id);
CREATE INDEX runs_queued ON runs (id) WHERE status = 'queued';
CREATE INDEX runs_running ON runs (id) WHERE status = 'running';
CREATE INDEX runs_waiting ON runs (waiting_until) WHERE status = 'waiting';
CREATE INDEX runs_finished ON runs (finished_at) WHERE finished_at IS NOT NULL;
CREATE INDEX runs_by_predecessor ON runs (continues) WHERE continues IS NOT NULL;
CREATE INDEX runs_by_thread ON runs (tenant, thread, id) WHERE thread IS NOT NULL;

-- Written once, read by a worker when it takes the run.
CREATE TABLE run_specs (
    run  TEXT COLLATE "C" NOT NULL PRIMARY KEY REFERENCES runs (id) ON DELETE CASCADE,
    spec TEXT NOT NULL -- JSON
);

-- The log. A body is the exact bytes every reader gets; nothing in the database looks into it.
CREATE TABLE run_events (
    run  TEXT   COLLATE "C" NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    seq  BIGINT NOT NULL,
    time BIGINT NOT NULL,
    kind TEXT   NOT NULL,
    body BYTEA  NOT NULL,
    PRIMARY KEY (run, seq)
);

-- An index over `runs.metadata`: finds runs by label, newest first.
CREATE TABLE run_metadata (
    tenant TEXT NOT NULL,
    key    TEXT NOT NULL,
    value  TEXT NOT NULL,
    run    TEXT COLLATE "C" NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    PRIMARY KEY (tenant, key, value, run)
);

CREATE INDEX run_metadata_by_run ON run_metadata (run);

-- What was said to a run while it was active, until the run takes it in.
CREATE TABLE run_inbox (
    run    TEXT   COLLATE "C" NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    number BIGINT NOT NULL, -- 1, 2, 3, …
    item   TEXT   NOT NULL, -- JSON
    PRIMARY KEY (run, number)
);

-- Answers that were given under an `Idempotency-Key`. They go with their run.
CREATE TABLE idempotency_keys (
    tenant      TEXT   NOT NULL,
    key         TEXT   NOT NULL,
    fingerprint TEXT   NOT NULL, -- of the request
    run         TEXT   COLLATE "C" NOT NULL REFERENCES runs (id) ON DELETE CASCADE,
    answer      TEXT   NOT NULL, -- JSON
    created_at  BIGINT NOT NULL,
    PRIMARY KEY (tenant, key)
);

CREATE INDEX idempotency_keys_by_run ON idempotency_keys (run);
CREATE INDEX idempotency_keys_by_age ON idempotency_keys (created_at);

-- Runs whose data was erased: that they were there is all that is kept of them.
CREATE TABLE erased_runs (
    run       TEXT   COLLATE "C" NOT NULL PRIMARY KEY,
    tenant    TEXT   NOT NULL,
    erased_at BIGINT NOT NULL
);

CREATE INDEX erased_runs_by_age ON erased_runs (erased_at);

-- Processes that work on runs, by the clock of the database alone. A SQLite file belongs to one process, so it has no
-- such table.
CREATE TABLE workers (
    id          TEXT        NOT NULL PRIMARY KEY,
    lease_until TIMESTAMPTZ NOT NULL, -- from then on others take its runs
    resumed_at  TIMESTAMPTZ           -- when it came back after its lease had ended; NULL when it never had
) WITH (fillfactor = 50);
