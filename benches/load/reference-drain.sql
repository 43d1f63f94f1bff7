-- Claims fifty waiting deliveries in one commit and settles them in the next.
WITH due AS (
    SELECT subscription, seq FROM reference_deliveries
    WHERE status = 0 AND due_at <= now()
    ORDER BY due_at, seq
    LIMIT 50
    FOR UPDATE SKIP LOCKED
), claimed AS (
    UPDATE reference_deliveries d SET status = 1, lease_until = now() + interval '40 seconds'
    FROM due
    WHERE d.subscription = due.subscription AND d.seq = due.seq
    RETURNING d.subscription, d.seq
)
SELECT coalesce(array_agg(subscription), '{}') AS subscriptions, coalesce(array_agg(seq), '{}') AS seqs FROM claimed \gset
UPDATE reference_deliveries d SET status = 2, lease_until = NULL
FROM unnest((:subscriptions)::text[], (:seqs)::bigint[]) AS done(subscription, seq)
WHERE d.subscription = done.subscription AND d.seq = done.seq AND d.status = 1;
