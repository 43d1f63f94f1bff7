-- Functions that do the work of a group in one round trip. The outermost of them says how its statements and those of
-- the functions it calls are planned: once, for any arguments, by looking rows up in an index and never by reading a
-- table from end to end because it was small when the plan was made. A bitmap is no better: it passes over dead entries of
-- an index without marking them, so that thousands a second are passed over again each time.
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

-- The same for what developer apps publish: they are as deep as first-party events and those of their own project make
-- them, and their own events are those of their project and environment. What apps publish counts for nobody else.
CREATE FUNCTION app_trace_depths(
    in_trace_id text[], in_source text[], in_event_type text[], in_subject_type text[], in_subject_id text[],
    in_project_id text[], in_env text[], in_rows bigint
) RETURNS TABLE (ordinal bigint, deepest_other integer, repeats integer)
LANGUAGE plpgsql
AS $$
BEGIN
    RETURN QUERY
    WITH RECURSIVE keys AS MATERIALIZED (
        SELECT * FROM (
            SELECT * FROM unnest(
                in_trace_id, in_source, in_event_type, in_subject_type, in_subject_id, in_project_id, in_env
            ) WITH ORDINALITY AS k(
                trace_id, source, event_type, subject_type, subject_id, project_id, env, ordinal
            )
        ) k
        WHERE k.trace_id IS NOT NULL AND k.project_id IS NOT NULL
    ), sources AS (
        SELECT t.trace_id, first.source, first.hops
        FROM (SELECT DISTINCT k.trace_id FROM keys k) t
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
    ), own AS (
        SELECT t.trace_id, t.project_id, t.env, first.source, first.hops
        FROM (SELECT DISTINCT k.trace_id, k.project_id, k.env FROM keys k) t
        CROSS JOIN LATERAL (
            SELECT e.source, e.hops FROM events e
            WHERE e.trace_id = t.trace_id AND e.project_id = t.project_id AND e.env = t.env
            ORDER BY e.source DESC, e.hops DESC LIMIT 1
        ) first
        UNION ALL
        SELECT o.trace_id, o.project_id, o.env, next.source, next.hops
        FROM own o
        CROSS JOIN LATERAL (
            SELECT e.source, e.hops FROM events e
            WHERE e.trace_id = o.trace_id AND e.project_id = o.project_id AND e.env = o.env AND e.source < o.source
            ORDER BY e.source DESC, e.hops DESC LIMIT 1
        ) next
    )
    SELECT k.ordinal,
           greatest(
               coalesce((SELECT max(s.hops) FROM sources s WHERE s.trace_id = k.trace_id), 0),
               coalesce((SELECT max(o.hops) FROM own o
                         WHERE o.trace_id = k.trace_id AND o.project_id = k.project_id AND o.env = k.env
                           AND o.source <> k.source), 0)
           ),
           (SELECT count(DISTINCT coalesce(d.request_id, d.id)) FROM (
                SELECT e.id, e.request_id, e.event_type, e.subject_type, e.subject_id FROM events e
                WHERE e.trace_id = k.trace_id AND e.project_id = k.project_id AND e.env = k.env AND e.source = k.source
                ORDER BY e.hops DESC LIMIT in_rows
            ) d
            WHERE d.event_type = k.event_type AND d.subject_type = k.subject_type
              AND d.subject_id = k.subject_id)::integer
    FROM keys k;
END
$$;

-- How many events of a project came in the last minute, by what `app_totals` says of it. A second counts as a whole, so the
-- answer is never too small. Seconds that lie far ahead are of a clock that was set back since.
CREATE FUNCTION recent_events(in_second bigint[], in_events integer[], in_now bigint) RETURNS bigint
LANGUAGE sql IMMUTABLE PARALLEL SAFE
RETURN (
    SELECT coalesce(sum(r.events), 0)::bigint FROM unnest(in_second, in_events) AS r(second, events)
    WHERE r.second * 1000 + 999 > in_now - 60000 AND r.second * 1000 < in_now + 60000
);

-- Stores accepted events with their receipts and deliveries, in the order given; answers the first position, from which
-- the others follow without a hole, and the carrier of each delivery whose key has a backlog on another carrier than was
-- planned (null where there is none). The caller holds the counter row.
--
-- The last unfinished row of each key that is extended is locked first, in position order, and heads are computed in a
-- later statement: in one statement, a publish and a settle would miss each other's work. While the caller holds the
-- counter row, nobody else makes a row unfinished: that row stays the last one, and its end waits for this group's.
--
-- The search for it ends where the key was last at rest. Behind that lie dead entries, as many as were delivered while
-- somebody held a snapshot.
CREATE FUNCTION store_events(
    in_now bigint, in_id text[], in_event_type text[], in_version bigint[], in_source text[], in_actor text[],
    in_on_behalf_of text[], in_subject_type text[], in_subject_id text[], in_subject_revision bigint[],
    in_trace_id text[], in_priority text[], in_visibility text[], in_occurred_at text[], in_payload text[],
    in_hops integer[], in_publisher text[], in_request_id text[], in_size_bytes bigint[],
    -- Of developer apps' events their project and environment. Empty where there are none of them.
    in_project_id text[], in_env text[],
    -- Deliveries: the event's place in the arrays above, from 1.
    in_of integer[], in_subscription_id text[], in_ordering_key text[], in_first_of_key boolean[],
    in_at_most_once boolean[], in_carrier text[], in_placement_id bigint[],
    in_counts_owner text, in_counts_role text, in_period_ms bigint,
    OUT first_position bigint, OUT pinned text[]
)
LANGUAGE plpgsql
AS $$
DECLARE
    -- How often the rows of keys are taken anew before the group is given up for now.
    rounds_max CONSTANT integer := 50;
    locked_id text[];
    locked_position bigint[];
    unheld boolean;
    heads boolean[];
BEGIN
    IF array_ndims(array_remove(in_ordering_key, NULL)) > 0 THEN
        FOR round IN 1..rounds_max LOOP
            BEGIN
                -- Materialized, or a table without statistics is joined by the subscription alone: all that waits for it,
                -- once for each key.
                WITH last AS MATERIALIZED (
                    SELECT k.subscription_id, tail.seq
                    FROM unnest(in_subscription_id, in_ordering_key, in_first_of_key)
                        AS k(subscription_id, ordering_key, first_of_key)
                    LEFT JOIN LATERAL (
                        SELECT least(r.open_from, r.seq) AS seq FROM deliveries r
                        WHERE r.subscription_id = k.subscription_id AND r.ordering_key = k.ordering_key
                          AND r.head AND r.status IN ('delivered', 'dead')
                        ORDER BY r.seq DESC LIMIT 1
                    ) rest ON true
                    CROSS JOIN LATERAL (
                        SELECT t.seq FROM deliveries t
                        WHERE t.subscription_id = k.subscription_id AND t.ordering_key = k.ordering_key
                          AND t.seq >= coalesce(rest.seq, 0) AND t.status IN ('pending', 'failed')
                        ORDER BY t.seq DESC LIMIT 1
                    ) tail
                    WHERE k.ordering_key IS NOT NULL AND k.first_of_key
                ), locked AS (
                    SELECT d.subscription_id, d.seq
                    FROM deliveries d
                    JOIN last ON last.subscription_id = d.subscription_id AND last.seq = d.seq
                    WHERE d.status IN ('pending', 'failed')
                    ORDER BY d.seq, d.subscription_id
                    FOR UPDATE OF d
                )
                SELECT array_agg(l.subscription_id), array_agg(l.seq) INTO locked_id, locked_position FROM locked l;
                -- One that was waited for may have ended, and an earlier row, replayed while it ran, be the last one now.
                -- To lock that now would break the order: everything is let go and taken anew. A key without any begins
                -- with the first of its new rows.
                SELECT array_agg(k.head ORDER BY k.ordinal), bool_or(k.unheld),
                       array_agg(nullif(k.backlog, k.carrier) ORDER BY k.ordinal)
                INTO heads, unheld, pinned
                FROM (
                    SELECT k.ordinal, k.carrier, k.first_of_key AND tail.seq IS NULL AS head,
                           tail.seq IS NOT NULL AND NOT EXISTS (
                               SELECT FROM unnest(locked_id, locked_position) AS l(id, position)
                               WHERE l.id = k.subscription_id AND l.position = tail.seq
                           ) AS unheld,
                           -- A backlog stays on one carrier until it has drained, and the whole group joins it.
                           max(tail.carrier) OVER (PARTITION BY k.subscription_id, k.ordering_key) AS backlog
                    FROM unnest(in_subscription_id, in_ordering_key, in_first_of_key, in_carrier)
                        WITH ORDINALITY AS k(subscription_id, ordering_key, first_of_key, carrier, ordinal)
                    LEFT JOIN LATERAL (
                        SELECT least(r.open_from, r.seq) AS seq FROM deliveries r
                        WHERE r.subscription_id = k.subscription_id AND r.ordering_key = k.ordering_key
                          AND k.first_of_key AND r.head AND r.status IN ('delivered', 'dead')
                        ORDER BY r.seq DESC LIMIT 1
                    ) rest ON true
                    LEFT JOIN LATERAL (
                        SELECT t.seq, t.carrier FROM deliveries t
                        WHERE t.subscription_id = k.subscription_id AND t.ordering_key = k.ordering_key
                          AND k.first_of_key AND t.seq >= coalesce(rest.seq, 0) AND t.status IN ('pending', 'failed')
                        ORDER BY t.seq DESC LIMIT 1
                    ) tail ON true
                ) k;
                EXIT WHEN NOT unheld;
                RAISE EXCEPTION 'the marks of the keys keep moving' USING ERRCODE = 'serialization_failure';
            EXCEPTION WHEN serialization_failure THEN
                IF round = rounds_max THEN
                    RAISE;
                END IF;
            END;
        END LOOP;
    END IF;

    WITH stored AS (
        INSERT INTO events (
            seq, id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id, subject_revision,
            trace_id, priority, visibility, occurred_at, received_at, payload, hops, publisher, request_id, size_bytes,
            project_id, env
        )
        SELECT nextval('event_positions'), t.id, t.event_type, t.version, t.source, t.actor, t.on_behalf_of,
               t.subject_type, t.subject_id, t.subject_revision, t.trace_id, t.priority, t.visibility, t.occurred_at,
               in_now, t.payload, t.hops, t.publisher, t.request_id, t.size_bytes, t.project_id,
               coalesce(t.env, 'production')
        FROM unnest(
            in_id, in_event_type, in_version, in_source, in_actor, in_on_behalf_of, in_subject_type, in_subject_id,
            in_subject_revision, in_trace_id, in_priority, in_visibility, in_occurred_at, in_payload, in_hops,
            in_publisher, in_request_id, in_size_bytes, in_project_id, in_env
        ) AS t(
            id, event_type, version, source, actor, on_behalf_of, subject_type, subject_id, subject_revision, trace_id,
            priority, visibility, occurred_at, payload, hops, publisher, request_id, size_bytes, project_id, env
        )
        RETURNING seq
    )
    SELECT min(seq) INTO first_position FROM stored;

    INSERT INTO idempotency_receipts (consumer, event_id, processed_at, owner)
    SELECT 'events:publish', i.id, in_now,
           CASE WHEN i.project_id IS NOT NULL THEN concat_ws('/', i.project_id, i.env, i.source, i.event_type) END
    FROM unnest(in_id, in_project_id, in_env, in_source, in_event_type) AS i(id, project_id, env, source, event_type)
    ON CONFLICT DO NOTHING;

    IF cardinality(in_of) > 0 THEN
        INSERT INTO deliveries (
            event_id, subscription_id, seq, priority, next_attempt_at, created_at, updated_at, ordering_key,
            at_most_once, head, carrier, placement_id
        )
        SELECT in_id[d.of], d.subscription_id, first_position + d.of - 1,
               CASE in_priority[d.of] WHEN 'critical' THEN 0 WHEN 'important' THEN 1 ELSE 2 END,
               in_now, in_now, in_now, d.ordering_key, d.at_most_once,
               d.ordering_key IS NULL OR d.head, coalesce(d.pinned, d.carrier), d.placement_id
        FROM unnest(in_of, in_subscription_id, in_ordering_key, in_at_most_once, heads, in_carrier, pinned, in_placement_id)
            AS d(of, subscription_id, ordering_key, at_most_once, head, carrier, pinned, placement_id);

        INSERT INTO delivery_counts AS c (owner, role, period, pending)
        VALUES (in_counts_owner, in_counts_role, in_now / in_period_ms, cardinality(in_of))
        ON CONFLICT (owner, role, period) DO UPDATE SET pending = c.pending + excluded.pending;
    END IF;

    -- Last in the order of locks. Others only ever take away from a total.
    IF cardinality(in_project_id) > 0 THEN
        INSERT INTO app_totals AS t (project_id, env, retained_bytes, recent_second, recent_events)
        SELECT n.project_id, n.env, sum(n.size_bytes), ARRAY[in_now / 1000], ARRAY[count(*)::integer]
        FROM unnest(in_project_id, in_env, in_size_bytes) AS n(project_id, env, size_bytes)
        WHERE n.project_id IS NOT NULL
        GROUP BY n.project_id, n.env
        ORDER BY n.project_id, n.env
        ON CONFLICT (project_id, env) DO UPDATE
        SET retained_bytes = t.retained_bytes + excluded.retained_bytes,
            (recent_second, recent_events) = (
                SELECT array_agg(r.second), array_agg(r.events)
                FROM (
                    SELECT h.second, sum(h.events)::integer AS events
                    FROM unnest(t.recent_second || excluded.recent_second, t.recent_events || excluded.recent_events)
                        AS h(second, events)
                    WHERE h.second * 1000 + 999 > in_now - 60000 AND h.second * 1000 < in_now + 60000
                    GROUP BY h.second
                ) r
            );
    END IF;
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
    in_publisher text[], in_request_id text[], in_size_bytes bigint[], in_project_id text[], in_env text[],
    -- What a project may publish in a minute and keep, by environment; null for no limit.
    in_quota_env text[], in_quota_rate bigint[], in_quota_bytes bigint[],
    in_of integer[], in_subscription_id text[], in_ordering_key text[], in_first_of_key boolean[],
    in_at_most_once boolean[], in_carrier text[], in_placement_id bigint[],
    in_counts_owner text, in_counts_role text, in_period_ms bigint
) RETURNS TABLE (first_position bigint, pinned text[])
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    hops integer[] := array_fill(1, ARRAY[cardinality(in_id)]);
    received_at bigint;
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
        IF cardinality(in_project_id) > 0 THEN
            SELECT array_agg(
                CASE WHEN in_project_id[place.ordinal] IS NULL THEN hops[place.ordinal]
                     ELSE coalesce(greatest(depth.deepest_other, depth.repeats), 0) + 1 END
                ORDER BY place.ordinal)
            INTO hops
            FROM generate_series(1, cardinality(in_id)) AS place(ordinal)
            LEFT JOIN app_trace_depths(
                in_guarded_trace_id, in_source, in_event_type, in_subject_type, in_subject_id, in_project_id, in_env,
                in_hops_max::bigint * 128
            ) depth ON depth.ordinal = place.ordinal;
        END IF;
        IF in_hops_max < ANY(hops) THEN
            RETURN;
        END IF;
    END IF;
    -- The clock after the wait, so that times of receipt follow positions.
    received_at := (extract(epoch FROM clock_timestamp()) * 1000)::bigint;
    -- Whether every project has room for what it brings. What is read here cannot grow before it is added to: only a publish
    -- adds, and it holds the counter row.
    IF cardinality(in_project_id) > 0 THEN
        PERFORM FROM (
            SELECT p.project_id, p.env, count(*) AS events, sum(p.size_bytes) AS bytes
            FROM unnest(in_project_id, in_env, in_size_bytes) AS p(project_id, env, size_bytes)
            WHERE p.project_id IS NOT NULL
            GROUP BY p.project_id, p.env
        ) brought
        JOIN unnest(in_quota_env, in_quota_rate, in_quota_bytes) AS quota(env, rate, bytes) ON quota.env = brought.env
        LEFT JOIN LATERAL (
            -- As `recent_events` counts. A call of it would cost more than everything else that quotas do.
            SELECT t.retained_bytes, (
                SELECT sum(r.events) FROM unnest(t.recent_second, t.recent_events) AS r(second, events)
                WHERE r.second * 1000 + 999 > received_at - 60000 AND r.second * 1000 < received_at + 60000
            ) AS recent
            FROM app_totals t WHERE t.project_id = brought.project_id AND t.env = brought.env
            LIMIT 1
        ) held ON true
        WHERE coalesce(held.recent, 0) + brought.events > quota.rate
           OR coalesce(held.retained_bytes, 0) + brought.bytes > quota.bytes;
        IF FOUND THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY SELECT s.first_position, s.pinned FROM store_events(
        received_at, in_id, in_event_type, in_version, in_source, in_actor,
        in_on_behalf_of, in_subject_type, in_subject_id, in_subject_revision, in_trace_id, in_priority, in_visibility, in_occurred_at, in_payload, hops,
        in_publisher, in_request_id, in_size_bytes, in_project_id, in_env, in_of, in_subscription_id, in_ordering_key, in_first_of_key,
        in_at_most_once, in_carrier, in_placement_id, in_counts_owner, in_counts_role, in_period_ms
    ) s;
END
$$;

-- Claims what is due for these subscriptions, within their caps and the room of the process. There is a row for each
-- subscription that was locked, and one for each of its claimed deliveries; without any, one row that says only how
-- things stand.
--
-- The subscriptions are locked first; what they have in flight is counted in a later statement, whose snapshot sees every
-- claim made before the lock.
CREATE FUNCTION claim_deliveries(
    in_id text[],
    -- Due times before these, by priority, hold nothing runnable.
    in_critical bigint[], in_important bigint[], in_low bigint[],
    -- Claims before these are not in flight.
    in_claims_from bigint[],
    -- Rows wanted at most of each, of all those of its consumer, and of all.
    in_own_room bigint[], in_consumer_room bigint[], in_room bigint,
    in_owner text, in_lease_ms bigint, in_inflight_default integer,
    -- Something else in this transaction must be durable.
    in_durable boolean
) RETURNS TABLE (
    version bigint, now_ms bigint, skipped boolean,
    subscription_id text, free bigint, claims_from bigint, consumer text, endpoint text, of_app boolean, secret text,
    previous_secret text, retry_policy text,
    seq bigint, attempt integer, at_most_once boolean, skipped_by_operator boolean, claim_id bigint, priority integer,
    due_at bigint,
    event_id text, event_type text, event_version bigint, source text, actor text, on_behalf_of text, subject_type text,
    subject_id text, subject_revision bigint, trace_id text, event_priority text, visibility text, occurred_at text,
    received_at bigint, payload text, hops integer,
    -- How the delivery was placed.
    carrier text, carrier_class text
)
LANGUAGE plpgsql
-- While the tables are small, a sort of everything would look as cheap as the index that has the order.
SET enable_sort = off
AS $$
#variable_conflict use_column
DECLARE
    locked_ids text[] := ARRAY(
        SELECT s.id FROM subscriptions s WHERE s.id = ANY(in_id) AND s.enabled = 1
        ORDER BY s.id
        FOR NO KEY UPDATE SKIP LOCKED
    );
    enabled bigint := (SELECT count(*) FROM subscriptions s WHERE s.id = ANY(in_id) AND s.enabled = 1);
    store_version bigint := (SELECT c.version FROM store_counter c WHERE c.name = 'events');
    -- Read under the locks: later claims of these subscriptions come behind it.
    last_claim bigint := (SELECT c.last_value FROM delivery_claims c);
BEGIN
    RETURN QUERY
    WITH locked AS MATERIALIZED (
        SELECT s.id, s.consumer, s.endpoint, s.project_id IS NOT NULL AS of_app, s.secret, s.retry_policy,
               CASE WHEN s.previous_secret_until > now_ms() THEN s.previous_secret END AS previous_secret,
               c.critical, c.important, c.low, c.consumer_room,
               least(c.own_room, greatest(coalesce(s.max_inflight, in_inflight_default) - flying.claims, 0)) AS free,
               coalesce(flying.oldest, last_claim) AS claims_from
        FROM unnest(in_id, in_critical, in_important, in_low, in_claims_from, in_own_room, in_consumer_room)
            AS c(id, critical, important, low, claims_from, own_room, consumer_room)
        JOIN subscriptions s ON s.id = c.id
        CROSS JOIN LATERAL (
            SELECT count(*) AS claims, min(l.claim_id) AS oldest FROM deliveries l
            WHERE l.subscription_id = s.id AND l.lease_until > now_ms()
              -- Numbers that are ahead of the database are of claims that a fail-over has lost.
              AND l.claim_id >= CASE WHEN c.claims_from > last_claim THEN 0 ELSE c.claims_from END
        ) flying
        WHERE s.id = ANY(locked_ids)
    ), runnable AS (
        SELECT l.consumer, l.consumer_room, d.*
        -- No more are locked than could be taken.
        FROM (SELECT *, least(free, consumer_room, in_room) AS most FROM locked) l
        CROSS JOIN LATERAL (
            SELECT r.* FROM (VALUES (0, l.critical), (1, l.important), (2, l.low)) AS p(priority, frontier)
            CROSS JOIN LATERAL (
                SELECT d.subscription_id, d.seq, d.priority, d.next_attempt_at FROM deliveries d
                WHERE d.subscription_id = l.id AND d.priority = p.priority
                  AND d.next_attempt_at >= p.frontier AND d.next_attempt_at <= now_ms()
                  AND d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
                ORDER BY d.next_attempt_at, d.seq
                LIMIT l.most
                FOR UPDATE SKIP LOCKED
            ) r
            ORDER BY r.priority, r.next_attempt_at, r.seq
            LIMIT l.most
        ) d
    ), shared AS (
        SELECT r.*, row_number() OVER (PARTITION BY r.consumer ORDER BY r.priority, r.next_attempt_at, r.seq) AS turn
        FROM runnable r
    ), picked AS MATERIALIZED (
        SELECT s.subscription_id, s.seq, s.next_attempt_at FROM shared s
        WHERE s.turn <= s.consumer_room
        -- What a consumer holds counts for its turns: of those with more room, each has held less so far.
        ORDER BY s.priority, s.turn - s.consumer_room, s.next_attempt_at, s.seq
        LIMIT in_room
    ), claimed AS (
        UPDATE deliveries d
        SET lease_owner = in_owner, lease_until = now_ms() + in_lease_ms, claim_id = nextval('delivery_claims'),
            claimed_generation = d.generation
        FROM picked p
        WHERE d.subscription_id = p.subscription_id AND d.seq = p.seq
        RETURNING d.subscription_id, d.seq, d.attempt + 1 AS attempt, d.at_most_once, d.skipped, d.claim_id, d.priority,
                  p.next_attempt_at AS due_at, d.carrier, d.placement_id
    )
    SELECT store_version, now_ms(), cardinality(locked_ids) < enabled,
           l.id, l.free, l.claims_from, l.consumer, l.endpoint, l.of_app, l.secret, l.previous_secret, l.retry_policy,
           c.seq, c.attempt, c.at_most_once, c.skipped, c.claim_id, c.priority, c.due_at,
           e.id, e.event_type, e.version, e.source, e.actor, e.on_behalf_of, e.subject_type, e.subject_id,
           e.subject_revision, e.trace_id, e.priority, e.visibility, e.occurred_at, e.received_at, e.payload, e.hops,
           c.carrier, o.carrier_class
    FROM (SELECT) one
    LEFT JOIN locked l ON true
    LEFT JOIN claimed c ON c.subscription_id = l.id
    -- In the claiming statement: a redaction that was answered before it shows here.
    LEFT JOIN events e ON e.seq = c.seq
    LEFT JOIN delivery_placements o ON o.id = c.placement_id
    ORDER BY c.priority, c.due_at, c.seq;

    -- A claim that may leave once only could be made, and sent, a second time after a crash of the database that undid it.
    -- Any other is simply made again, so its commit does not wait for the disk.
    IF NOT in_durable AND NOT EXISTS (
        SELECT FROM unnest(locked_ids) AS i(id)
        JOIN deliveries d ON d.subscription_id = i.id AND d.claim_id >= last_claim AND d.lease_until IS NOT NULL
        WHERE d.lease_owner = in_owner AND d.at_most_once
    ) THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    END IF;
END
$$;

-- Puts the mark of each key on its first unfinished row, looking for it from a position on before which nothing of the key
-- is unfinished. A row that was waiting behind becomes due now at the earliest, so that claims which no longer look at old
-- due times find it.
CREATE FUNCTION move_heads(
    in_subscription_id text[], in_ordering_key text[], in_position bigint[], in_from bigint[]
) RETURNS void
LANGUAGE plpgsql
AS $$
BEGIN
    WITH firsts AS MATERIALIZED (
        SELECT k.subscription_id, k.position, first.seq
        FROM unnest(in_subscription_id, in_ordering_key, in_position, in_from)
            AS k(subscription_id, ordering_key, position, start)
        CROSS JOIN LATERAL (
            SELECT f.seq FROM deliveries f
            WHERE f.subscription_id = k.subscription_id AND f.ordering_key = k.ordering_key AND f.seq >= k.start
              AND f.status IN ('pending', 'failed')
            ORDER BY f.seq LIMIT 1
        ) first
    ), marked AS (
        UPDATE deliveries d
        SET head = true, open_from = NULL, next_attempt_at = greatest(d.next_attempt_at, now_ms())
        FROM (SELECT DISTINCT f.subscription_id, f.seq FROM firsts f) f
        WHERE d.subscription_id = f.subscription_id AND d.seq = f.seq AND NOT d.head
    )
    UPDATE deliveries d SET head = false
    FROM firsts f
    WHERE d.subscription_id = f.subscription_id AND d.seq = f.position AND f.position > f.seq
      AND d.head AND d.status IN ('pending', 'failed');
END
$$;

-- Records results of claims that the owner holds. Answers the claims that were lost meanwhile, whose results changed
-- nothing; null when the marks of the keys moved while this waited, so that it must begin anew.
--
-- The rows, and the ones that may carry the marks of their keys next, are locked in position order, the order in which a
-- publish locks the rows it extends; marks move in a later statement, which sees what such a publish added. A claimed row
-- carries the mark, so what follows it is looked for behind it, or from where a replay put one back.
CREATE FUNCTION settle_deliveries(
    in_owner text, in_subscription_id text[], in_position bigint[], in_claim_id bigint[], in_outcome text[],
    in_http_status integer[], in_error text[], in_wait_ms bigint[],
    -- What is on record of a delivery that an operator ended while it was under way.
    in_skipped_error text,
    -- How long to wait for rows that others hold; null for as long as any statement may.
    in_lock_timeout text,
    in_counts_owner text, in_counts_role text, in_period_ms bigint
) RETURNS bigint[]
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    locked_id text[];
    locked_position bigint[];
    held bigint[];
    key_id text[];
    key_name text[];
    key_position bigint[];
    key_from bigint[];
    key_claim bigint[];
    -- Those of `key_claim` whose keys have another unfinished row.
    going_on bigint[];
    moved boolean;
    change record;
BEGIN
    IF in_lock_timeout IS NOT NULL THEN
        PERFORM set_config('lock_timeout', in_lock_timeout, true);
    END IF;
    WITH mine AS MATERIALIZED (
        SELECT d.subscription_id, d.seq, d.ordering_key, least(d.open_from, d.seq) AS start
        FROM unnest(in_subscription_id, in_position, in_claim_id) AS s(subscription_id, seq, claim_id)
        JOIN deliveries d ON d.subscription_id = s.subscription_id AND d.seq = s.seq
        WHERE d.claim_id = s.claim_id AND d.lease_owner = in_owner
    ), wanted AS MATERIALIZED (
        SELECT m.subscription_id, m.seq FROM mine m
        UNION
        SELECT m.subscription_id, next.seq FROM mine m
        CROSS JOIN LATERAL (
            SELECT n.seq FROM deliveries n
            WHERE n.subscription_id = m.subscription_id AND n.ordering_key = m.ordering_key AND n.seq >= m.start
              AND n.status IN ('pending', 'failed') AND n.seq <> m.seq
            ORDER BY n.seq LIMIT 1
        ) next
        WHERE m.ordering_key IS NOT NULL
    ), locked AS (
        SELECT d.subscription_id, d.seq, d.claim_id, d.ordering_key, least(d.open_from, d.seq) AS start
        FROM deliveries d
        JOIN wanted w ON w.subscription_id = d.subscription_id AND w.seq = d.seq
        ORDER BY d.seq, d.subscription_id
        FOR UPDATE OF d
    )
    SELECT array_agg(l.subscription_id), array_agg(l.seq),
           array_agg(l.claim_id) FILTER (WHERE l.claim_id = ANY(in_claim_id)),
           array_agg(l.subscription_id) FILTER (WHERE l.ordering_key IS NOT NULL AND l.claim_id = ANY(in_claim_id)),
           array_agg(l.ordering_key) FILTER (WHERE l.ordering_key IS NOT NULL AND l.claim_id = ANY(in_claim_id)),
           array_agg(l.seq) FILTER (WHERE l.ordering_key IS NOT NULL AND l.claim_id = ANY(in_claim_id)),
           array_agg(l.start) FILTER (WHERE l.ordering_key IS NOT NULL AND l.claim_id = ANY(in_claim_id)),
           array_agg(l.claim_id) FILTER (WHERE l.ordering_key IS NOT NULL AND l.claim_id = ANY(in_claim_id))
    INTO locked_id, locked_position, held, key_id, key_name, key_position, key_from, key_claim
    FROM locked l;

    -- A replay may have put other rows in front while this waited. To lock those now would break the order, and two that
    -- wait for each other would follow: everything is let go and taken anew.
    IF key_id IS NOT NULL THEN
        SELECT array_agg(k.claim_id),
               bool_or(NOT EXISTS (
                   SELECT FROM unnest(locked_id, locked_position) AS l(id, position)
                   WHERE l.id = k.id AND l.position = next.seq
               ))
        INTO going_on, moved
        FROM unnest(key_id, key_name, key_position, key_from, key_claim) AS k(id, name, position, start, claim_id)
        CROSS JOIN LATERAL (
            SELECT n.seq FROM deliveries n
            WHERE n.subscription_id = k.id AND n.ordering_key = k.name AND n.seq >= k.start
              AND n.status IN ('pending', 'failed') AND n.seq <> k.position
            ORDER BY n.seq LIMIT 1
        ) next;
        IF moved THEN
            RETURN NULL;
        END IF;
    END IF;

    WITH former AS MATERIALIZED (
        SELECT d.subscription_id, d.seq, d.claim_id, d.status, r.outcome, r.http_status, r.error, r.wait_ms,
               d.generation = d.claimed_generation AS current,
               CASE WHEN d.generation IS DISTINCT FROM d.claimed_generation THEN 'pending'
                    WHEN r.outcome = 'unsent' THEN d.status
                    WHEN r.outcome = 'given_up' OR r.outcome IN ('failed', 'held') AND d.skipped THEN 'dead'
                    WHEN r.outcome = 'held' THEN 'failed'
                    ELSE r.outcome END AS becomes
        FROM unnest(in_subscription_id, in_position, in_claim_id, in_outcome, in_http_status, in_error, in_wait_ms)
            AS r(subscription_id, seq, claim_id, outcome, http_status, error, wait_ms)
        JOIN deliveries d ON d.subscription_id = r.subscription_id AND d.seq = r.seq AND d.claim_id = r.claim_id
        WHERE d.lease_owner = in_owner
    ), recorded AS (
        UPDATE deliveries d
        SET status = f.becomes,
            -- Where nothing of the key is left, it is at rest here.
            head = d.head AND (d.ordering_key IS NULL OR f.becomes IN ('pending', 'failed')
                               OR d.claim_id <> ALL(coalesce(going_on, '{}'))),
            open_from = NULL,
            attempt = CASE WHEN NOT f.current THEN 0
                           WHEN f.outcome IN ('unsent', 'given_up', 'held') THEN d.attempt
                           ELSE d.attempt + 1 END,
            next_attempt_at = CASE WHEN NOT f.current OR f.outcome = 'unsent'
                                     OR f.outcome IN ('failed', 'held') AND NOT d.skipped
                                   THEN now_ms() + CASE WHEN f.current THEN f.wait_ms ELSE 0 END END,
            last_status = CASE WHEN NOT f.current THEN NULL
                               WHEN f.outcome IN ('unsent', 'held') THEN d.last_status ELSE f.http_status END,
            last_error = CASE WHEN NOT f.current THEN NULL
                              WHEN f.outcome = 'unsent' THEN d.last_error
                              WHEN f.outcome IN ('failed', 'held') AND d.skipped
                              THEN left(concat_ws('; before that: ', in_skipped_error, f.error), 500)
                              ELSE f.error END,
            delivered_at = CASE WHEN f.current AND f.outcome = 'delivered' THEN now_ms() END,
            lease_owner = NULL, lease_until = NULL, claim_id = NULL, updated_at = now_ms()
        FROM former f
        WHERE d.subscription_id = f.subscription_id AND d.seq = f.seq
        RETURNING d.status, f.status AS former
    )
    SELECT count(*) FILTER (WHERE r.status = 'pending') - count(*) FILTER (WHERE r.former = 'pending') AS pending,
           count(*) FILTER (WHERE r.status = 'failed') - count(*) FILTER (WHERE r.former = 'failed') AS failed,
           count(*) FILTER (WHERE r.status = 'delivered') AS delivered,
           count(*) FILTER (WHERE r.status = 'dead') AS dead
    INTO change FROM recorded r;
    IF key_id IS NOT NULL THEN
        PERFORM move_heads(key_id, key_name, key_position, key_from);
    END IF;
    IF change.pending <> 0 OR change.failed <> 0 OR change.delivered <> 0 OR change.dead <> 0 THEN
        INSERT INTO delivery_counts AS c (owner, role, period, pending, failed, delivered, dead)
        VALUES (in_counts_owner, in_counts_role, now_ms() / in_period_ms, change.pending, change.failed,
                change.delivered, change.dead)
        ON CONFLICT (owner, role, period) DO UPDATE
        SET pending = c.pending + excluded.pending, failed = c.failed + excluded.failed,
            delivered = c.delivered + excluded.delivered, dead = c.dead + excluded.dead;
    END IF;
    RETURN ARRAY(SELECT unnest(in_claim_id) EXCEPT SELECT unnest(held));
END
$$;

-- Records results and claims what may run then, in one transaction. There is no row where recording must begin anew: then
-- nothing was recorded and nothing claimed. What recording frees is free for the claim.
CREATE FUNCTION settle_and_claim(
    in_owner text, in_subscription_id text[], in_position bigint[], in_claim_id bigint[], in_outcome text[],
    in_http_status integer[], in_error text[], in_wait_ms bigint[], in_skipped_error text, in_lock_timeout text,
    in_counts_owner text, in_counts_role text, in_period_ms bigint,
    in_id text[], in_critical bigint[], in_important bigint[], in_low bigint[], in_claims_from bigint[],
    in_own_room bigint[], in_consumer_room bigint[], in_room bigint, in_lease_ms bigint, in_inflight_default integer
) RETURNS TABLE (
    lost bigint[],
    version bigint, now_ms bigint, skipped boolean,
    subscription_id text, free bigint, claims_from bigint, consumer text, endpoint text, of_app boolean, secret text,
    previous_secret text, retry_policy text,
    seq bigint, attempt integer, at_most_once boolean, skipped_by_operator boolean, claim_id bigint, priority integer,
    due_at bigint,
    event_id text, event_type text, event_version bigint, source text, actor text, on_behalf_of text, subject_type text,
    subject_id text, subject_revision bigint, trace_id text, event_priority text, visibility text, occurred_at text,
    received_at bigint, payload text, hops integer,
    -- How the delivery was placed.
    carrier text, carrier_class text
)
LANGUAGE plpgsql
SET plan_cache_mode = force_generic_plan SET jit = off
SET enable_seqscan = off SET enable_bitmapscan = off SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
DECLARE
    lost_claims bigint[] := '{}';
BEGIN
    IF cardinality(in_claim_id) > 0 THEN
        lost_claims := settle_deliveries(
            in_owner, in_subscription_id, in_position, in_claim_id, in_outcome, in_http_status, in_error, in_wait_ms,
            in_skipped_error, in_lock_timeout, in_counts_owner, in_counts_role, in_period_ms
        );
        IF lost_claims IS NULL THEN
            RETURN;
        END IF;
    END IF;
    RETURN QUERY
    SELECT lost_claims, c.* FROM claim_deliveries(
        in_id, in_critical, in_important, in_low, in_claims_from, in_own_room, in_consumer_room, in_room, in_owner,
        in_lease_ms, in_inflight_default, cardinality(in_claim_id) > 0
    ) c;
END
$$;
