-- The store: positions, events, receipts, subscriptions, deliveries, checkpoints, workers.
--
-- Times are bigint milliseconds since the Unix epoch. Text is compared byte by byte. Names that the service before this
-- one used keep their meaning; keys and indexes are chosen for how the rows are claimed and read here.

-- Milliseconds of the database clock at the start of the current statement. STABLE, so an index can be searched by it.
CREATE FUNCTION now_ms() RETURNS bigint LANGUAGE sql STABLE PARALLEL SAFE
    RETURN (extract(epoch FROM statement_timestamp()) * 1000)::bigint;

-- The one row that orders everything. Publishing locks it and never updates it: a row that is updated by every publish
-- slows down while any snapshot is held. Its version moves when something that publishing depends on changes.
CREATE TABLE store_counter (
    name text COLLATE "C" PRIMARY KEY CHECK (name = 'events'),
    version bigint NOT NULL DEFAULT 1,
    -- The first eight characters of the WAL file name, empty until the first publish.
    timeline text COLLATE "C" NOT NULL DEFAULT ''
);
INSERT INTO store_counter (name) VALUES ('events');

-- Positions are taken from here under the lock of store_counter. Numbers lost to a rollback stay holes.
CREATE SEQUENCE event_positions AS bigint CACHE 1;

-- Positions up to this one were removed from the log. It keeps the head known when no event is left.
CREATE TABLE store_floor (
    name text COLLATE "C" PRIMARY KEY,
    value bigint NOT NULL
);
INSERT INTO store_floor (name, value) VALUES ('events', 0);

-- The history that positions belong to. It changes only when the store is truncated or imported again.
CREATE TABLE store_epoch (
    name text COLLATE "C" PRIMARY KEY,
    value bigint NOT NULL
);
INSERT INTO store_epoch (name, value) VALUES ('events', 0);

CREATE FUNCTION raise_store_version() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    -- A moment, not a count: after a fail-over that lost changes, a later change must not bring back a number that
    -- processes have seen.
    UPDATE store_counter
    SET version = greatest(version + 1, (extract(epoch FROM clock_timestamp()) * 1000)::bigint)
    WHERE name = 'events';
    RETURN NULL;
END
$$;

CREATE TRIGGER store_epoch_version BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON store_epoch
    FOR EACH STATEMENT EXECUTE FUNCTION raise_store_version();

CREATE TABLE events (
    id text COLLATE "C" PRIMARY KEY,
    seq bigint NOT NULL UNIQUE,
    event_type text COLLATE "C" NOT NULL,
    version bigint NOT NULL,
    source text COLLATE "C" NOT NULL,
    actor text COLLATE "C" NOT NULL,
    on_behalf_of text COLLATE "C",
    subject_type text COLLATE "C" NOT NULL,
    subject_id text COLLATE "C" NOT NULL,
    subject_revision bigint,
    trace_id text COLLATE "C" NOT NULL,
    priority text COLLATE "C" NOT NULL,
    visibility text COLLATE "C" NOT NULL,
    occurred_at text COLLATE "C" NOT NULL,
    received_at bigint NOT NULL,
    payload text COLLATE "C" NOT NULL,
    hops integer NOT NULL DEFAULT 1,
    publisher text COLLATE "C" NOT NULL,
    -- The server's own id of the publish request: siblings share it, the loop guard counts by it.
    request_id text COLLATE "C",
    project_id text COLLATE "C",
    env text COLLATE "C" NOT NULL DEFAULT 'production',
    size_bytes bigint NOT NULL DEFAULT 0,
    redacted_at bigint,
    redacted_by text COLLATE "C",
    redacts integer NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 50);
-- The loop guard's probes: sources of a trace, deepest first.
CREATE INDEX events_trace ON events (trace_id, source, hops) WHERE project_id IS NULL;
-- The same within a project, for what its apps publish.
CREATE INDEX events_app_trace ON events (trace_id, project_id, env, source, hops) WHERE project_id IS NOT NULL;
-- What a project's apps read, and its newest events.
CREATE INDEX events_project ON events (project_id, env, seq) WHERE project_id IS NOT NULL;
-- A pull of one exact type.
CREATE INDEX events_type ON events (event_type, seq);

-- What was published, remembered longer than the event itself.
CREATE TABLE idempotency_receipts (
    consumer text COLLATE "C" NOT NULL,
    event_id text COLLATE "C" NOT NULL,
    processed_at bigint NOT NULL,
    -- Whose event it was and of which type, where a developer app published it: nobody else's id is its duplicate.
    owner text COLLATE "C",
    PRIMARY KEY (consumer, event_id)
);

CREATE TABLE subscriptions (
    id text COLLATE "C" PRIMARY KEY,
    consumer text COLLATE "C" NOT NULL,
    topic_pattern text COLLATE "C" NOT NULL,
    endpoint text COLLATE "C" NOT NULL,
    secret text COLLATE "C" NOT NULL,
    enabled integer NOT NULL DEFAULT 1,
    retry_policy text COLLATE "C",
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    project_id text COLLATE "C",
    env text COLLATE "C" NOT NULL DEFAULT 'production',
    previous_secret text COLLATE "C",
    previous_secret_until bigint,
    -- Deliveries in flight at a time; without a value, what the process is configured for.
    max_inflight integer CHECK (max_inflight BETWEEN 1 AND 64)
);
-- One subscription per consumer, project, environment, pattern and endpoint, also when two are created at once.
CREATE UNIQUE INDEX subscriptions_identity
    ON subscriptions (consumer, env, topic_pattern, endpoint, coalesce(project_id, ''));
-- How many a project holds.
CREATE INDEX subscriptions_project ON subscriptions (project_id, env) WHERE project_id IS NOT NULL;
CREATE TRIGGER subscriptions_version BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON subscriptions
    FOR EACH STATEMENT EXECUTE FUNCTION raise_store_version();

-- No foreign keys: they cost nearly half of the insert rate and lock the subscription of every row.
CREATE TABLE deliveries (
    event_id text COLLATE "C" NOT NULL,
    subscription_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    priority integer NOT NULL CHECK (priority BETWEEN 0 AND 2),
    attempt integer NOT NULL DEFAULT 0,
    status text COLLATE "C" NOT NULL DEFAULT 'pending' CHECK (status IN ('pending', 'failed', 'delivered', 'dead')),
    next_attempt_at bigint,
    last_error text COLLATE "C",
    last_status integer,
    delivered_at bigint,
    created_at bigint NOT NULL,
    updated_at bigint NOT NULL,
    lease_owner text COLLATE "C",
    lease_until bigint,
    ordering_key text COLLATE "C",
    carrier text COLLATE "C",
    -- The row may run: always without a key, with a key when it is the first unfinished one of it. A finished row of a key
    -- keeps the mark where it left nothing of the key to run: what is unfinished came behind it, or `open_from` tells.
    head boolean NOT NULL,
    -- Earlier rows of the key may be unfinished, from this position on: a replay put one back while this row ran, or after
    -- it was the last of its key. Null where none is; it says nothing on a row without the mark.
    open_from bigint,
    claim_id bigint,
    -- Raised by a replay; a claim that finds another value at its end releases the row instead of finishing it.
    generation integer NOT NULL DEFAULT 0,
    claimed_generation integer,
    PRIMARY KEY (subscription_id, seq)
) WITH (fillfactor = 90, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000);
-- The operators' list over all subscriptions.
CREATE UNIQUE INDEX deliveries_position ON deliveries (seq, subscription_id);
-- What a claim looks for.
CREATE INDEX deliveries_runnable ON deliveries (subscription_id, priority, next_attempt_at, seq)
    WHERE head AND lease_until IS NULL AND status IN ('pending', 'failed');
-- What is in flight: the cap of a subscription, and leases that ended. In the order of the claims, so that a count begins
-- with the oldest one that was in flight at the count before: what ended before that leaves dead entries.
CREATE INDEX deliveries_leased ON deliveries (subscription_id, claim_id) WHERE lease_until IS NOT NULL;
-- The first and the last unfinished row of a key. Each finished row leaves dead entries here, which stay for as long as
-- anybody holds a snapshot: a search begins at a position before which nothing of the key is unfinished.
CREATE INDEX deliveries_key ON deliveries (subscription_id, ordering_key, seq)
    WHERE ordering_key IS NOT NULL AND status IN ('pending', 'failed');
-- Where a key was at rest: the newest of these says from where on rows of it may be unfinished.
CREATE INDEX deliveries_rest ON deliveries (subscription_id, ordering_key, seq)
    WHERE ordering_key IS NOT NULL AND head AND status IN ('delivered', 'dead');
-- The dead-letter queue.
CREATE INDEX deliveries_dead ON deliveries (seq, subscription_id) WHERE status = 'dead';

-- Without a cache, so that claims of one subscription, which are made one after the other under its lock, grow.
CREATE SEQUENCE delivery_claims AS bigint CACHE 1;

-- How many deliveries are in each status: changes by process, role and period, summed on read and folded into the row
-- of an empty owner, so that no two transactions of different processes meet on one row.
CREATE TABLE delivery_counts (
    owner text COLLATE "C" NOT NULL,
    role text COLLATE "C" NOT NULL,
    period bigint NOT NULL,
    pending bigint NOT NULL DEFAULT 0,
    failed bigint NOT NULL DEFAULT 0,
    delivered bigint NOT NULL DEFAULT 0,
    dead bigint NOT NULL DEFAULT 0,
    PRIMARY KEY (owner, role, period)
) WITH (fillfactor = 50);

-- One row per worker process, renewed each second; a lease ends with its owner.
CREATE TABLE workers (
    owner text COLLATE "C" PRIMARY KEY,
    alive_until bigint NOT NULL
) WITH (fillfactor = 50);

CREATE TABLE consumer_checkpoints (
    consumer text COLLATE "C" NOT NULL,
    env text COLLATE "C" NOT NULL DEFAULT 'production',
    topic_pattern text COLLATE "C" NOT NULL,
    cursor bigint NOT NULL,
    epoch bigint NOT NULL DEFAULT 0,
    carrier text COLLATE "C",
    updated_at bigint NOT NULL,
    PRIMARY KEY (consumer, env, topic_pattern)
);
