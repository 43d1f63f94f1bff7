-- Delivery policies: how each event type is carried. A change raises the version that publishing compares.

CREATE TABLE delivery_policies (
    pattern text COLLATE "C" PRIMARY KEY,
    policy jsonb NOT NULL,
    revision integer NOT NULL DEFAULT 1,
    updated_at bigint NOT NULL,
    updated_by text COLLATE "C"
);
CREATE TRIGGER delivery_policies_version BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON delivery_policies
    FOR EACH STATEMENT EXECUTE FUNCTION raise_store_version();

-- Whether the delivery may leave a process once only; chosen when it is made.
ALTER TABLE deliveries ADD COLUMN at_most_once boolean NOT NULL DEFAULT false;
