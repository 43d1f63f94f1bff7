-- Live streams: tickets that opened one, the moment from which on everybody may be shown public events again, and
-- when a person's sessions were withdrawn.

-- Tickets that were used. A row is kept until the ticket would have ended by itself.
CREATE TABLE realtime_tickets (
    id text COLLATE "C" PRIMARY KEY,
    expires_at bigint NOT NULL
);
CREATE INDEX realtime_tickets_expired ON realtime_tickets (expires_at);

-- Withdrawals of a person's sessions are few, and each stream that a person opens asks for theirs.
CREATE INDEX events_withdrawals ON events (subject_id, seq)
    WHERE event_type = 'network.user.token_valid_after' AND source = 'network';

-- Where the events after `after`, up to `upto`, that were received at `since` or later begin: behind the last older one, or at
-- `after` + 1 where there is none older, since a position that nothing holds is nothing missed; `upto` + 1 where all are older.
-- Events are received in the order of their positions, so the place is found by halving: some thirty looks at the index,
-- however long the history is.
CREATE FUNCTION first_received_since(after bigint, upto bigint, since bigint) RETURNS bigint
    LANGUAGE plpgsql STABLE AS $$
DECLARE
    -- Whatever stands at or before `low` is older; whatever stands after `high` is not.
    low bigint := after;
    high bigint := upto;
    found_seq bigint;
    found_at bigint;
BEGIN
    -- Mostly somebody comes back after a moment, and has missed nothing that is older.
    SELECT seq, received_at INTO found_seq, found_at FROM events WHERE seq > low AND seq <= high ORDER BY seq LIMIT 1;
    IF found_seq IS NULL OR found_at >= since THEN
        RETURN after + 1;
    END IF;
    low := found_seq;
    WHILE low < high LOOP
        SELECT seq, received_at INTO found_seq, found_at
        FROM events WHERE seq > low + (high - low) / 2 AND seq <= high ORDER BY seq LIMIT 1;
        IF found_seq IS NULL OR found_at >= since THEN
            high := low + (high - low) / 2;
        ELSE
            low := found_seq;
        END IF;
    END LOOP;
    RETURN coalesce((SELECT seq FROM events WHERE seq > high AND seq <= upto ORDER BY seq LIMIT 1), upto + 1);
END
$$;
