-- R100: a hundred events and their deliveries a commit, in one round trip; each envelope crosses the wire.
WITH event AS (
    INSERT INTO reference_events (event_id, type, envelope)
    SELECT reference_id(), 'live.load.happened', envelope FROM (VALUES
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope),
    (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope), (:envelope)
    ) AS given(envelope)
    RETURNING seq
)
INSERT INTO reference_deliveries (subscription, seq) SELECT 'sub_' || :client_id, seq FROM event;
