-- Functions that do the work of a group in one round trip. The outermost of them says how its statements and those of
-- the functions it calls are planned: once, for any arguments, by looking rows up in an index and never by reading a
-- table from end to end because it was small when the plan was made.
--
-- A released function is never changed: another version of it gets another name, since two releases run side by side.

-- What is stored of traces, for the loop guard: of each key the deepest event of another source, and the publish requests
-- that said the same about the same subject. Each probe is bounded: the sources of a trace are skipped through by index,
-- and repeats are looked for among the deepest rows only, where a loop's own rows are. A key without a trace has neither.
CREATE FUNCTION trace_depths(
    in_trace_id text[], in_source text[], in_event_type text[], in_subject_type text[], in_subject_id text[],
    in_rows bigint
) RETURNS TABLE (ordinal bigint, deepest_other integer, repeats integer)
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE keys AS MATERIALIZED (
        SELECT * FROM unnest(in_trace_id, in_source, in_event_type, in_subject_type, in_subject_id)
            WITH ORDINALITY AS k(trace_id, source, event_type, subject_type, subject_id, ordinal)
    ), sources AS (
        SELECT t.trace_id, first.source, first.hops
        FROM (SELECT DISTINCT k.trace_id FROM keys k WHERE k.trace_id IS NOT NULL) t
        CROSS JOIN LATERAL (
            SELECT e.source, e.hops FROM events e
            WHERE e.trace_id = t.trace_id AND e.project_id IS NULL
            ORDER BY e.source DESC, e.hops DESC LIMIT 1
        ) first
        UNION ALL
        SELECT s.trace_id, next.source, next.hops
        FROM sources s
        CROSS JOIN LATERAL (
            SELECT e.source, e.hops FROM events e
            WHERE e.trace_id = s.trace_id AND e.source < s.source AND e.project_id IS NULL
            ORDER BY e.source DESC, e.hops DESC LIMIT 1
        ) next
    )
    SELECT k.ordinal,
           coalesce((SELECT max(s.hops) FROM sources s WHERE s.trace_id = k.trace_id AND s.source <> k.source), 0),
           (SELECT count(DISTINCT coalesce(d.request_id, d.id)) FROM (
                SELECT e.id, e.request_id, e.event_type, e.subject_type, e.subject_id FROM events e
                WHERE e.trace_id = k.trace_id AND e.source = k.source AND e.project_id IS NULL
                ORDER BY e.hops DESC LIMIT in_rows
            ) d
            WHERE d.event_type = k.event_type AND d.subject_type = k.subject_type
              AND d.subject_id = k.subject_id)::integer
    FROM keys k
    WHERE k.trace_id IS NOT NULL;
END
$$;

-- Stores accepted events with their receipts and deliveries, in the order given; answers the first position, from which
-- the others follow without a hole. The caller holds the counter row.
--
-- The last unfinished row of each key that is extended is locked first, in position order, and heads are computed in a
-- later statement: in one statement, a publish and a settle would miss each other's work.
CREATE FUNCTION store_events(
    in_now bigint, in_id text[], in_event_type text[], in_version bigint[], in_source text[], in_actor text[],
    in_on_behalf_of text[], in_subject_type text[], in_subject_id text[], in_subject_revision bigint[],
    in_trace_id text[], in_priority text[], in_visibility text[], in_occurred_at text[], in_payload text[],
    in_hops integer[], in_publisher text[], in_request_id text[], in_size_bytes bigint[],
    -- Deliveries: the event's place in the arrays above, from 1.
    in_of integer[], in_subscription_id text[], in_ordering_key text[], in_first_of_key boolean[],
    in_at_most_once boolean[],
    in_counts_owner text, in_counts_role text, in_period_ms bigint
) RETURNS bigint
LANGUAGE plpgsql
AS $$
DECLARE
    first_position bigint;
BEGIN
    IF array_ndims(array_remove(in_ordering_key, NULL)) > 0 THEN
        PERFORM d.seq
        FROM deliveries d
        JOIN (
            SELECT DISTINCT tail.subscription_id, tail.seq
            FROM unnest(in_subscription_id, in_ordering_key) AS k(subscription_id, ordering_key)
            CROSS JOIN LATERAL (
                SELECT t.subscription_id, t.seq FROM deliveries t
                WHERE t.subscription_id = k.subscription_id AND t.ordering_key = k.ordering_key
                  AND t.status IN ('pending', 'failed')
                ORDER BY t.seq DESC LIMIT 1
            ) tail
            WHERE k.ordering_key IS NOT NULL
        ) last ON last.subscription_id = d.subscription_id AND last.seq = d.seq
        WHERE d.status IN ('pending', 'failed')
        ORDER BY d.seq, d.subscription_id
        FOR UPDATE OF d;
    END IF;

    WITH stored AS (
        INSERT INTO events (
            seq, id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id, subject_revision,
            trace_id, priority, visibility, occurred_at, received_at, payload, hops, publisher, request_id, size_bytes
        )
        SELECT nextval('event_positions'), t.id, t.event_type, t.version, t.source, t.actor, t.on_behalf_of,
               t.subject_type, t.subject_id, t.subject_revision, t.trace_id, t.priority, t.visibility, t.occurred_at,
               in_now, t.payload, t.hops, t.publisher, t.request_id, t.size_bytes
        FROM unnest(
            in_id, in_event_type, in_version, in_source, in_actor, in_on_behalf_of, in_subject_type, in_subject_id,
            in_subject_revision, in_trace_id, in_priority, in_visibility, in_occurred_at, in_payload, in_hops,
            in_publisher, in_request_id, in_size_bytes
        ) AS t(
            id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id, subject_revision, trace_id,
            priority, visibility, occurred_at, payload, hops, publisher, request_id, size_bytes
        )
        RETURNING seq
    )
    SELECT min(seq) INTO first_position FROM stored;

    INSERT INTO idempotency_receipts (consumer, event_id, processed_at)
    SELECT 'events:publish', id, in_now FROM unnest(in_id) AS i(id)
    ON CONFLICT DO NOTHING;

    IF cardinality(in_of) > 0 THEN
        INSERT INTO deliveries (
            event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, ordering_key,
            at_most_once, head
        )
        SELECT in_id[d.of], d.subscription_id, first_position + d.of - 1,
               CASE in_priority[d.of] WHEN 'critical' THEN 0 WHEN 'important' THEN 1 ELSE 2 END,
               in_now, in_now, in_now, d.ordering_key, d.at_most_once,
               d.ordering_key IS NULL OR (d.first_of_key AND NOT EXISTS (
                   SELECT FROM deliveries earlier
                   WHERE earlier.subscription_id = d.subscription_id AND earlier.ordering_key = d.ordering_key
                     AND earlier.status IN ('pending', 'failed')
               ))
        FROM unnest(in_of, in_subscription_id, in_ordering_key, in_first_of_key, in_at_most_once)
            AS d(of, subscription_id, ordering_key, first_of_key, at_most_once);

        INSERT INTO delivery_counts AS c (owner, role, period, pending)
        VALUES (in_counts_owner, in_counts_role, in_now / in_period_ms, cardinality(in_of))
        ON CONFLICT (owner, role, period) DO UPDATE SET pending = c.pending + excluded.pending;
    END IF;
    RETURN first_position;
END
$$;

-- A whole group as one transaction of one statement, where nothing is to be decided: the caller's view is in force, every
-- id is new, and no trace is too deep. Otherwise nothing is stored and there is no row; the caller then looks closer.
-- A statement of its own that waits for the row, and later ones that see what was committed meanwhile.
CREATE FUNCTION publish_group(
    in_store_version bigint, in_hops_max integer,
    -- The trace of each event that the loop guard looks at; null for one that starts its own.
    in_guarded_trace_id text[],
    in_id text[], in_event_type text[], in_version bigint[], in_source text[], in_actor text[],
    in_on_behalf_of text[], in_subject_type text[], in_subject_id text[], in_subject_revision bigint[],
    in_trace_id text[], in_priority text[], in_visibility text[], in_occurred_at text[], in_payload text[],
    in_publisher text[], in_request_id text[], in_size_bytes bigint[],
    in_of integer[], in_subscription_id text[], in_ordering_key text[], in_first_of_key boolean[],
    in_at_most_once boolean[],
    in_counts_owner text, in_counts_role text, in_period_ms bigint
) RETURNS TABLE (first_position bigint)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    hops integer[] := array_fill(1, ARRAY[cardinality(in_id)]);
BEGIN
    PERFORM FROM store_counter
    WHERE name = 'events' AND version = in_store_version
      AND timeline = left(pg_walfile_name(pg_current_wal_lsn()), 8)
    FOR UPDATE;
    IF NOT FOUND THEN
        RETURN;
    END IF;
    -- One probe an id: as a join or an array, a plan made while the table was small could walk the whole index.
    PERFORM FROM unnest(in_id) AS i(id)
    WHERE (SELECT true FROM idempotency_receipts r WHERE r.consumer = 'events:publish' AND r.event_id = i.id);
    IF FOUND THEN
        RETURN;
    END IF;
    IF array_ndims(array_remove(in_guarded_trace_id, NULL)) > 0 THEN
        SELECT array_agg(coalesce(greatest(depth.deepest_other, depth.repeats), 0) + 1 ORDER BY place.ordinal)
        INTO hops
        FROM generate_series(1, cardinality(in_id)) AS place(ordinal)
        LEFT JOIN trace_depths(
            in_guarded_trace_id, in_source, in_event_type, in_subject_type, in_subject_id, in_hops_max::bigint * 128
        ) depth ON depth.ordinal = place.ordinal;
        IF in_hops_max < ANY(hops) THEN
            RETURN;
        END IF;
    END IF;
    -- The clock after the wait, so that times of receipt follow positions.
    RETURN QUERY SELECT store_events(
        (extract(epoch FROM clock_timestamp()) * 1000)::bigint, in_id, in_event_type, in_version, in_source, in_actor, in_on_behalf_of, in_subject_type,
        in_subject_id, in_subject_revision, in_trace_id, in_priority, in_visibility, in_occurred_at, in_payload, hops,
        in_publisher, in_request_id, in_size_bytes, in_of, in_subscription_id, in_ordering_key, in_first_of_key,
        in_at_most_once, in_counts_owner, in_counts_role, in_period_ms
    );
END
$$;
