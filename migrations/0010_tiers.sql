-- The replay tier: events that are old enough leave the hot store, with their deliveries, and stay readable under their
-- positions. What a reader chooses by is a column; everything else is one compressed body.
CREATE TABLE events_archive (
    id text COLLATE "C" PRIMARY KEY,
    seq bigint NOT NULL,
    epoch bigint NOT NULL,
    event_type text COLLATE "C" NOT NULL,
    source text COLLATE "C" NOT NULL,
    subject_type text COLLATE "C" NOT NULL,
    subject_id text COLLATE "C" NOT NULL,
    visibility text COLLATE "C" NOT NULL,
    project_id text COLLATE "C",
    env text COLLATE "C" NOT NULL DEFAULT 'production',
    received_at bigint NOT NULL,
    redacted_at bigint,
    redacts integer NOT NULL DEFAULT 0,
    -- gzip of a JSON object with the other members of the event.
    body bytea NOT NULL,
    archived_at bigint NOT NULL,
    -- Restored by an operator, and kept until then whatever its age.
    hold_until bigint,
    -- Whose event it is, where a person who may see it acted: their stream finds it without unpacking. It says nothing once
    -- the event is redacted.
    actor_id text COLLATE "C",
    -- As of the event: pages are bounded by what they unpack.
    size_bytes bigint NOT NULL DEFAULT 0
) WITH (autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 1000,
        autovacuum_vacuum_insert_scale_factor = 0.05);
-- It is compressed already.
ALTER TABLE events_archive ALTER COLUMN body SET STORAGE EXTERNAL;
-- The order of reading. Two events on one position are refused aloud.
CREATE UNIQUE INDEX events_archive_position ON events_archive (epoch, seq);
-- A pull of one exact type.
CREATE INDEX events_archive_type ON events_archive (event_type, seq);
-- A pull of a developer app.
CREATE INDEX events_archive_project ON events_archive (project_id, env, epoch, seq) WHERE project_id IS NOT NULL;
-- What is past its time, and the rows of a month.
CREATE INDEX events_archive_received ON events_archive (received_at, epoch, seq);
-- What a directive names by subject.
CREATE INDEX events_archive_subject ON events_archive (source, subject_type, subject_id);
-- As of the hot store: when a person's sessions were withdrawn.
CREATE INDEX events_archive_withdrawals ON events_archive (subject_id, seq)
    WHERE event_type = 'network.user.token_valid_after' AND source = 'network';

-- What is old enough to leave the hot store.
CREATE INDEX events_received ON events (received_at, seq);

-- Receipts go in batches, and their room is used again.
ALTER TABLE idempotency_receipts SET (autovacuum_vacuum_scale_factor = 0.02);

-- 'events' is the last position that no tier can read any more; 'head' is the highest that ever left the hot store, so that
-- the head is known while that is empty.
INSERT INTO store_floor (name, value) SELECT 'head', value FROM store_floor WHERE name = 'events';

-- Where the log begins and ends, both tiers taken together.
CREATE VIEW log_bounds AS
    SELECT epoch.value AS epoch, greatest((SELECT max(seq) FROM events), floor.value, top.value) AS head,
           floor.value AS floor
    FROM store_epoch epoch, store_floor floor, store_floor top
    WHERE epoch.name = 'events' AND floor.name = 'events' AND top.name = 'head';

-- Both tiers as one sequence, by what events are chosen by. A position is in one of them in any snapshot.
CREATE VIEW event_log AS
    SELECT seq, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at, size_bytes,
           actor
    FROM events
    UNION ALL
    (SELECT seq, event_type, source, subject_type, subject_id, visibility, project_id, env, received_at,
           greatest(size_bytes, octet_length(body)) AS size_bytes,
           CASE WHEN redacted_at IS NULL THEN actor_id END AS actor
    FROM events_archive
    WHERE epoch = (SELECT value FROM store_epoch WHERE name = 'events')
    -- A part with a condition is planned on its own: without this it would be sorted whole for each page.
    ORDER BY seq);

-- As before, over both tiers.
CREATE OR REPLACE FUNCTION first_received_since(after bigint, upto bigint, since bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- Whatever stands at or before `low` is older; whatever stands after `high` is not.
    low bigint := after;
    high bigint := upto;
    found_seq bigint;
    found_at bigint;
BEGIN
    -- Mostly somebody comes back after a moment, and has missed nothing that is older.
    SELECT seq, received_at INTO found_seq, found_at FROM event_log WHERE seq > low AND seq <= high ORDER BY seq LIMIT 1;
    IF found_seq IS NULL OR found_at >= since THEN
        RETURN after + 1;
    END IF;
    low := found_seq;
    WHILE low < high LOOP
        SELECT seq, received_at INTO found_seq, found_at
        FROM event_log WHERE seq > low + (high - low) / 2 AND seq <= high ORDER BY seq LIMIT 1;
        IF found_seq IS NULL OR found_at >= since THEN
            high := low + (high - low) / 2;
        ELSE
            low := found_seq;
        END IF;
    END LOOP;
    RETURN coalesce((SELECT seq FROM event_log WHERE seq > high AND seq <= upto ORDER BY seq LIMIT 1), upto + 1);
END
$$;
