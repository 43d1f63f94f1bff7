-- Developer apps: what their projects hold, and what the network has withdrawn from them.

-- Of each project and environment: how much its events hold in the hot tier, and how many came lately. A publish adds to it,
-- under the counter row and after everything else that it locks; room that is freed is credited by the triggers below.
CREATE TABLE app_totals (
    project_id text COLLATE "C" NOT NULL,
    env text COLLATE "C" NOT NULL,
    retained_bytes bigint NOT NULL DEFAULT 0,
    -- Events of the last minute, by the second of their receipt.
    recent_second bigint[] NOT NULL DEFAULT '{}',
    recent_events integer[] NOT NULL DEFAULT '{}',
    PRIMARY KEY (project_id, env)
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0.01, autovacuum_vacuum_threshold = 50);

-- What an event no longer holds, its project may use again: in the transaction that removes it or makes it smaller, whoever
-- runs that, and so exactly once. The totals are the last in the order of locks, so whoever removes deliveries and events
-- removes the deliveries first.
CREATE FUNCTION credit_removed_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WITH freed AS MATERIALIZED (
        SELECT r.project_id, r.env, sum(r.size_bytes) AS bytes FROM removed r
        WHERE r.project_id IS NOT NULL
        GROUP BY r.project_id, r.env
    ), locked AS MATERIALIZED (
        SELECT t.project_id, t.env, f.bytes FROM app_totals t
        JOIN freed f ON f.project_id = t.project_id AND f.env = t.env
        ORDER BY t.project_id, t.env
        FOR UPDATE OF t
    )
    UPDATE app_totals t SET retained_bytes = greatest(t.retained_bytes - l.bytes, 0)
    FROM locked l WHERE t.project_id = l.project_id AND t.env = l.env;
    RETURN NULL;
END
$$;
CREATE TRIGGER events_removed AFTER DELETE ON events REFERENCING OLD TABLE AS removed
    FOR EACH STATEMENT EXECUTE FUNCTION credit_removed_events();

CREATE FUNCTION credit_changed_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    WITH freed AS MATERIALIZED (
        SELECT c.project_id, c.env, sum(c.bytes) AS bytes FROM (
            SELECT f.project_id, f.env, f.size_bytes AS bytes FROM former f
            UNION ALL
            SELECT p.project_id, p.env, -p.size_bytes FROM present p
        ) c
        WHERE c.project_id IS NOT NULL
        GROUP BY c.project_id, c.env
        HAVING sum(c.bytes) <> 0
    ), locked AS MATERIALIZED (
        SELECT t.project_id, t.env, f.bytes FROM app_totals t
        JOIN freed f ON f.project_id = t.project_id AND f.env = t.env
        ORDER BY t.project_id, t.env
        FOR UPDATE OF t
    )
    UPDATE app_totals t SET retained_bytes = greatest(t.retained_bytes - l.bytes, 0)
    FROM locked l WHERE t.project_id = l.project_id AND t.env = l.env;
    RETURN NULL;
END
$$;
CREATE TRIGGER events_changed AFTER UPDATE ON events REFERENCING OLD TABLE AS former NEW TABLE AS present
    FOR EACH STATEMENT EXECUTE FUNCTION credit_changed_events();

CREATE FUNCTION credit_all_events() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    UPDATE app_totals SET retained_bytes = 0;
    RETURN NULL;
END
$$;
CREATE TRIGGER events_emptied AFTER TRUNCATE ON events FOR EACH STATEMENT EXECUTE FUNCTION credit_all_events();

-- When the network withdrew something from an app last. It is in force for the next request anywhere.
CREATE TABLE app_revocations (
    -- `app:` and the app's id.
    consumer text COLLATE "C" NOT NULL,
    -- All of it, or the grant to subscribe.
    scope text COLLATE "C" NOT NULL CHECK (scope IN ('app', 'events.app.subscribe')),
    revoked_at bigint NOT NULL,
    PRIMARY KEY (consumer, scope)
);
CREATE TRIGGER app_revocations_version BEFORE INSERT OR UPDATE OR DELETE OR TRUNCATE ON app_revocations
    FOR EACH STATEMENT EXECUTE FUNCTION raise_store_version();
