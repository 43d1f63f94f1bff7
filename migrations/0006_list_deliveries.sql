-- A page of the operators' list, by position and subscription. It looks at so many rows at most: where few of them are
-- asked for, the page is short, and a last row that is not `wanted` says how far it looked. What failed or is dead has an
-- index of its own; few that wait are found by what a claim looks for, however much was delivered before them.
CREATE FUNCTION list_deliveries(
    in_status text, in_subscription_id text,
    -- Rows after this place.
    in_position bigint, in_after text,
    in_limit bigint, in_looked_at bigint
) RETURNS TABLE (
    event_id text, subscription_id text, seq bigint, status text, attempt integer, next_attempt_at bigint,
    last_status integer, last_error text, delivered_at bigint, wanted boolean
)
LANGUAGE plpgsql STABLE
-- Planned for what is asked, so that each filter finds its index.
SET plan_cache_mode = force_custom_plan SET enable_seqscan = off SET enable_bitmapscan = off
SET enable_hashjoin = off SET enable_mergejoin = off
AS $$
#variable_conflict use_column
DECLARE
    -- Rows of these are looked for in an index that holds no others.
    indexed boolean := coalesce(in_status IN ('failed', 'dead'), false);
    open_id text[];
    open_position bigint[];
    looked_at bigint;
    given bigint := 0;
BEGIN
    wanted := true;
    IF in_status = 'pending' THEN
        -- A row that is not finished has no key or is the first of it, is in flight, or has a key.
        SELECT array_agg(o.subscription_id) FILTER (WHERE o.status = 'pending'),
               array_agg(o.seq) FILTER (WHERE o.status = 'pending'), count(*)
        INTO open_id, open_position, looked_at
        FROM (
            SELECT d.subscription_id, d.seq, d.status FROM deliveries d
            WHERE d.head AND d.lease_until IS NULL AND d.status IN ('pending', 'failed')
              AND (in_subscription_id IS NULL OR d.subscription_id = in_subscription_id)
            UNION ALL
            SELECT d.subscription_id, d.seq, d.status FROM deliveries d
            WHERE d.lease_until IS NOT NULL
              AND (in_subscription_id IS NULL OR d.subscription_id = in_subscription_id)
            UNION ALL
            SELECT d.subscription_id, d.seq, d.status FROM deliveries d
            WHERE d.ordering_key IS NOT NULL AND d.status IN ('pending', 'failed')
              AND (in_subscription_id IS NULL OR d.subscription_id = in_subscription_id)
            LIMIT in_looked_at + 1
        ) o;
        IF looked_at <= in_looked_at THEN
            RETURN QUERY
            SELECT d.event_id, d.subscription_id, d.seq, d.status, d.attempt, d.next_attempt_at, d.last_status,
                   d.last_error, d.delivered_at, true
            FROM (
                SELECT DISTINCT u.id, u.position FROM unnest(open_id, open_position) AS u(id, position)
                WHERE (u.position, u.id) > (in_position, in_after)
                ORDER BY u.position, u.id LIMIT in_limit
            ) o
            JOIN deliveries d ON d.subscription_id = o.id AND d.seq = o.position
            ORDER BY d.seq, d.subscription_id;
            RETURN;
        END IF;
    END IF;

    looked_at := 0;
    FOR event_id, subscription_id, seq, status, attempt, next_attempt_at, last_status, last_error, delivered_at IN
        SELECT d.event_id, d.subscription_id, d.seq, d.status, d.attempt, d.next_attempt_at, d.last_status,
               d.last_error, d.delivered_at
        FROM deliveries d
        WHERE (d.seq, d.subscription_id) > (in_position, in_after)
          AND (NOT indexed OR d.status = in_status)
          AND (indexed OR in_subscription_id IS NULL OR d.subscription_id = in_subscription_id)
        ORDER BY d.seq, d.subscription_id
        LIMIT in_looked_at
    LOOP
        looked_at := looked_at + 1;
        IF status = coalesce(in_status, status) AND subscription_id = coalesce(in_subscription_id, subscription_id) THEN
            given := given + 1;
            RETURN NEXT;
            IF given = in_limit THEN
                RETURN;
            END IF;
        END IF;
    END LOOP;
    IF looked_at = in_looked_at THEN
        wanted := false;
        RETURN NEXT;
    END IF;
END
$$;
