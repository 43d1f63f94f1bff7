-- What failed and waits for another attempt, for the operators' list. Built at once: a concurrent build would hold up the
-- start for as long as anybody holds a snapshot, and one that was cut short would stay behind, invalid.
CREATE INDEX IF NOT EXISTS deliveries_failed ON deliveries (seq, subscription_id) WHERE status = 'failed';
