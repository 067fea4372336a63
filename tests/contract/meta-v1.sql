-- The meta store's schema of version 1, as SQLite has it, with something of what a directory of that time holds.
CREATE TABLE dead_letters (
    id INTEGER NOT NULL,
    sink_id BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    at FLOAT NOT NULL,
    code VARCHAR(64) NOT NULL,
    reason TEXT NOT NULL,
    path TEXT NOT NULL,
    rows BIGINT NOT NULL,
    replayed BOOLEAN NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE epochs (
    lane VARCHAR(200) NOT NULL,
    epoch BIGINT NOT NULL,
    kind VARCHAR(16) NOT NULL,
    committed_at FLOAT NOT NULL,
    generation BIGINT NOT NULL,
    PRIMARY KEY (lane, epoch)
);
CREATE TABLE errors (
    id INTEGER NOT NULL,
    at FLOAT NOT NULL,
    job_id BIGINT,
    name TEXT NOT NULL,
    code VARCHAR(64) NOT NULL,
    message TEXT NOT NULL,
    hint TEXT NOT NULL,
    retrying BOOLEAN NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE job_states (
    job_id BIGINT NOT NULL,
    part VARCHAR(64) NOT NULL,
    epoch BIGINT NOT NULL,
    value JSON NOT NULL,
    PRIMARY KEY (job_id, part)
);
CREATE TABLE jobs (
    id INTEGER NOT NULL,
    name TEXT NOT NULL,
    kind VARCHAR(16) NOT NULL,
    state VARCHAR(16) NOT NULL,
    lane TEXT NOT NULL,
    definition TEXT NOT NULL,
    spec JSON NOT NULL,
    created_epoch BIGINT NOT NULL,
    live_epoch BIGINT NOT NULL,
    dropped_epoch BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE owner (
    id INTEGER NOT NULL,
    generation BIGINT NOT NULL,
    owner TEXT NOT NULL,
    PRIMARY KEY (id)
);
CREATE TABLE pins (
    holder VARCHAR(200) NOT NULL,
    epoch BIGINT NOT NULL,
    PRIMARY KEY (holder)
);
CREATE TABLE positions (
    source_id BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    position TEXT NOT NULL,
    PRIMARY KEY (source_id, epoch)
);
CREATE TABLE resets (
    table_id BIGINT NOT NULL,
    epoch BIGINT NOT NULL,
    PRIMARY KEY (table_id, epoch)
);
CREATE TABLE segments (
    id INTEGER NOT NULL,
    table_id BIGINT NOT NULL,
    path TEXT NOT NULL,
    kind VARCHAR(8) NOT NULL,
    is_change BOOLEAN NOT NULL,
    rows BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    added_epoch BIGINT NOT NULL,
    removed_epoch BIGINT NOT NULL,
    PRIMARY KEY (id)
);
CREATE INDEX segments_by_removal ON segments (removed_epoch);
CREATE INDEX segments_by_table ON segments (table_id, added_epoch);
CREATE TABLE settings (
    name VARCHAR(64) NOT NULL,
    value TEXT NOT NULL,
    PRIMARY KEY (name)
);
CREATE TABLE splits (
    table_id BIGINT NOT NULL,
    generation BIGINT NOT NULL,
    split_id BIGINT NOT NULL,
    "left" TEXT,
    "right" TEXT,
    state VARCHAR(16) NOT NULL,
    row_count BIGINT NOT NULL,
    bytes BIGINT NOT NULL,
    offset_low TEXT,
    offset_high TEXT,
    staged_path TEXT,
    handed_over_epoch BIGINT,
    PRIMARY KEY (table_id, generation, split_id)
);
INSERT INTO settings VALUES ('schema_version', '1'), ('next_job_id', '3'), ('next_segment_id', '2'), ('seq_high', '7');
INSERT INTO owner VALUES (1, 4, 'host:1');
INSERT INTO jobs VALUES (1, 'orders', 'table', 'live', 'main', 'CREATE TABLE orders (id BIGINT)', '{"inputs": []}', 5, 5, 9223372036854775807);
INSERT INTO jobs VALUES (2, 'out', 'sink', 'live', 'main', 'CREATE SINK out', '{"inputs": [1]}', 5, 5, 9223372036854775807);
INSERT INTO segments VALUES (1, 1, 'tables/1/a.parquet', 'delta', 1, 3, 100, 5, 9223372036854775807);
INSERT INTO epochs VALUES ('main', 5, 'checkpoint', 1.0, 4), ('view gone', 3, 'checkpoint', 0.5, 4);
INSERT INTO errors VALUES (1, 1.0, 1, 'orders', 'SOURCE_UNREACHABLE', 'what happened', 'what to do', 1);
INSERT INTO dead_letters VALUES (1, 2, 5, 1.0, 'SINK_ROW_REFUSED', 'why', 'letters/a.parquet', 2, 0);
