-- R1: one event and one delivery a commit, in one round trip. :envelope comes from the command line.
WITH event AS (
    INSERT INTO reference_events (event_id, type, envelope) VALUES (reference_id(), 'live.load.happened', :envelope)
    RETURNING seq
)
INSERT INTO reference_deliveries (subscription, seq) SELECT 'sub_' || :client_id, seq FROM event;
