-- What failed and waits for another attempt, for the operators' list.
CREATE INDEX IF NOT EXISTS deliveries_failed ON deliveries (seq, subscription_id) WHERE status = 'failed';
