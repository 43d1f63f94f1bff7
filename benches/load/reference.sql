-- What a lean application would keep events and deliveries in: the references of scripts/bench.sh run against this, never
-- against the service's own tables. It stays as it is, so that a heavier schema of the service does not flatter it.

CREATE TABLE reference_events (
    seq bigserial PRIMARY KEY,
    event_id text COLLATE "C" NOT NULL UNIQUE,
    type text COLLATE "C" NOT NULL,
    -- 1.3 KB: an envelope around a payload of 1 KB.
    envelope text COLLATE "C" NOT NULL
);
CREATE INDEX reference_events_type ON reference_events (type, seq);

CREATE TABLE reference_deliveries (
    subscription text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    -- 0 waiting, 1 claimed, 2 delivered.
    status smallint NOT NULL DEFAULT 0,
    due_at timestamptz NOT NULL DEFAULT now(),
    lease_until timestamptz,
    PRIMARY KEY (subscription, seq)
);
CREATE INDEX reference_deliveries_due ON reference_deliveries (due_at, seq) WHERE status = 0;

-- An id whose first part grows with time, as those of real events do.
CREATE FUNCTION reference_id() RETURNS text LANGUAGE sql VOLATILE
    RETURN 'evt_' || lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint), 12, '0')
        || left(replace(gen_random_uuid()::text, '-', ''), 14);
