-- breaking: yes
-- What people read.

CREATE FUNCTION like_of(p_pattern text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT pg_catalog.replace(pg_catalog.replace(pg_catalog.replace(pg_catalog.replace(p_pattern, '\', '\\'), '%', '\%'), '_', '\_'), '*', '%')
$$;

-- Why a ready job does not run; NULL: it only waits for its turn.
CREATE FUNCTION obstacle(p_lane int) RETURNS text LANGUAGE sql STABLE SECURITY DEFINER AS $$
  SELECT CASE
    WHEN l.paused_at IS NOT NULL THEN 'resume: job type paused by ' || l.paused_by
    WHEN NOT EXISTS (SELECT FROM worker w, unnest(w.job_types) t(pattern) WHERE w.status = 'live' AND l.job_type LIKE like_of(t.pattern))
      THEN 'a worker: no living worker can run this job type'
  END FROM lane l WHERE l.lane = p_lane
$$ SET search_path FROM CURRENT;

CREATE FUNCTION last_error_of(p_job_id uuid) RETURNS text LANGUAGE sql STABLE SECURITY DEFINER AS $$
  SELECT a.error FROM attempt a WHERE a.job_id = p_job_id AND a.applied ORDER BY a.run DESC, a.finished_at DESC LIMIT 1
$$ SET search_path FROM CURRENT;

-- A job in ready is found by its position: by the one in its own row, or by requeued when it came there later. So a look-up by id
-- finds it among millions without an index on the id.
CREATE VIEW jobs_all AS
  SELECT j.id, j.job_type, j.tenant AS tenant_id, s.lane, s.priority, s.status,
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END AS data, NULL::jsonb AS result, s.attempts, j.max_attempts,
    j.run_at, j.created_at, NULL::timestamptz AS started_at, NULL::timestamptz AS completed_at, NULL::uuid AS worker_id,
    last_error_of(j.id) AS last_error, j.unique_key, j.labels, obstacle(s.lane) AS waiting_for, j.timeout, j.options, s.run
  FROM (SELECT r.*, 'pending'::text AS status FROM ready r WHERE r.flags & 2 = 0) s
  JOIN job j ON j.id = s.id AND j.lane = s.lane AND j.priority = s.priority AND j.pos = s.pos
UNION ALL
  SELECT j.id, j.job_type, j.tenant, s.lane, s.priority, 'pending',
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END, NULL, s.attempts, j.max_attempts,
    j.run_at, j.created_at, NULL, NULL, NULL, last_error_of(j.id), j.unique_key, j.labels, obstacle(s.lane), j.timeout, j.options, s.run
  FROM requeued q JOIN ready s ON s.lane = q.lane AND s.priority = q.priority AND s.pos = q.pos AND s.id = q.id JOIN job j ON j.id = q.id
UNION ALL
  SELECT j.id, j.job_type, j.tenant, s.lane, s.priority, 'scheduled',
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END, NULL, s.attempts, j.max_attempts,
    s.due, j.created_at, NULL, NULL, NULL, last_error_of(j.id), j.unique_key, j.labels, s.waits_for, j.timeout, j.options, s.run
  FROM later s JOIN job j ON j.id = s.id
UNION ALL
  SELECT j.id, j.job_type, j.tenant, s.lane, s.priority, 'blocked',
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END, NULL, s.attempts, j.max_attempts,
    j.run_at, j.created_at, NULL, NULL, NULL, last_error_of(j.id), j.unique_key, j.labels, 'dependencies', j.timeout, j.options, s.run
  FROM blocked s JOIN job j ON j.id = s.id
UNION ALL
  SELECT j.id, j.job_type, j.tenant, s.lane, s.priority, 'running',
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END, NULL, s.attempts, s.max_attempts,
    j.run_at, j.created_at, s.started_at, NULL, s.worker, last_error_of(j.id), j.unique_key, j.labels,
    (SELECT 'the handler to stop: ' || q.kind || ' asked for by ' || q.requested_by FROM stop_request q WHERE q.id = s.id), j.timeout, j.options, s.run
  FROM lease s JOIN job j ON j.id = s.id
UNION ALL
  SELECT j.id, j.job_type, j.tenant, s.lane, j.priority, s.status,
    CASE WHEN s.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = j.id) END, s.result, s.attempts, j.max_attempts,
    j.run_at, j.created_at, s.started_at, s.finished_at, s.worker, s.error, j.unique_key, j.labels,
    CASE s.status WHEN 'failed' THEN 'review' END, j.timeout, j.options, s.run
  FROM outcome s JOIN job j ON j.id = s.id;

CREATE FUNCTION status_of(p_id uuid) RETURNS text LANGUAGE sql STABLE AS $$ SELECT j.status FROM jobs_all j WHERE j.id = p_id $$;

-- The tenants that a role may use and see; NULL: all.
CREATE FUNCTION tenants_of(p_role name) RETURNS text[] LANGUAGE sql STABLE SECURITY DEFINER AS $$
  SELECT CASE
    WHEN pg_has_role(p_role, (SELECT c.relowner FROM pg_class c WHERE c.oid = 'tenant_grant'::regclass), 'MEMBER')
      OR EXISTS (SELECT FROM pg_roles r WHERE r.rolname IN ('tenure_worker', 'tenure_admin') AND pg_has_role(p_role, r.oid, 'MEMBER'))
      OR EXISTS (SELECT FROM tenant_grant g JOIN pg_roles r ON r.rolname = g.role_name WHERE g.tenant = '*' AND pg_has_role(p_role, r.oid, 'MEMBER'))
    THEN NULL
    ELSE coalesce((SELECT array_agg(g.tenant) FROM tenant_grant g JOIN pg_roles r ON r.rolname = g.role_name WHERE pg_has_role(p_role, r.oid, 'MEMBER')), '{default}')
  END
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION tenants_of(name) IS 'The tenants that a role may use and see (tenant_grant); NULL: all.';

CREATE FUNCTION assert_tenants(p_tenants text[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  v_tenants text[];
BEGIN
  -- Called by SECURITY DEFINER functions: current_user owns the schema, session_user is the caller.
  IF session_user = current_user THEN RETURN; END IF;
  v_tenants := tenants_of(session_user);
  IF NOT p_tenants <@ v_tenants THEN
    PERFORM refuse('TN006', format('role %I may not enqueue for all of these tenants: %s', session_user, array_to_string(p_tenants, ', ')),
      'An owner grants it: INSERT INTO tenant_grant (role_name, tenant) VALUES (''ROLE'', ''TENANT''); the tenant * is all.');
  END IF;
END $$;

CREATE VIEW jobs WITH (security_barrier) AS
  SELECT a.id, a.job_type, a.tenant_id, l.shard, a.priority, a.status, a.data, a.result, a.attempts, a.max_attempts, a.run_at, a.created_at,
    a.started_at, a.completed_at, a.worker_id, a.last_error, a.unique_key, a.labels, a.waiting_for, a.timeout, a.options
  FROM jobs_all a JOIN lane l ON l.lane = a.lane
  WHERE (SELECT tenants_of(current_user) IS NULL) OR a.tenant_id = ANY ((SELECT tenants_of(current_user))::text[]);
COMMENT ON VIEW jobs IS
  'All jobs of the tenants that the reader may see. INSERT enqueues (RETURNING and COPY work; ON CONFLICT (id) does not, give the id to tenure.enqueue instead). FOR UPDATE locks nothing here: use tenure.assert_lease.';
COMMENT ON COLUMN jobs.status IS 'scheduled | blocked | pending | running | completed | failed (a dead letter, waits for review) | discarded | cancelled';
COMMENT ON COLUMN jobs.waiting_for IS 'scheduled: time, retry, snooze or window (workers re-attach). pending: what keeps it from running, NULL when it only waits for its turn.';

CREATE FUNCTION insert_job() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_given text;
BEGIN
  SELECT string_agg(x.name, ', ') INTO v_given FROM (VALUES
    ('status', NEW.status IS NOT NULL), ('shard', NEW.shard IS NOT NULL), ('result', NEW.result IS NOT NULL), ('attempts', NEW.attempts IS NOT NULL),
    ('created_at', NEW.created_at IS NOT NULL), ('started_at', NEW.started_at IS NOT NULL), ('completed_at', NEW.completed_at IS NOT NULL),
    ('worker_id', NEW.worker_id IS NOT NULL), ('last_error', NEW.last_error IS NOT NULL), ('waiting_for', NEW.waiting_for IS NOT NULL)) x(name, given)
    WHERE x.given;
  IF v_given IS NOT NULL THEN
    PERFORM refuse('TN007', 'an INSERT into jobs cannot set ' || v_given, 'Leave these columns out: tenure sets them.');
  END IF;
  NEW.id := (put_jobs(ARRAY[ROW(NEW.job_type, NEW.data, NEW.priority, NEW.run_at, NEW.tenant_id, NEW.unique_key, NEW.max_attempts, NEW.timeout, NEW.id,
    NEW.labels, NEW.options)::new_job]))[1];
  RETURN NEW;
END $$ SET search_path FROM CURRENT;
CREATE TRIGGER enqueue INSTEAD OF INSERT ON jobs FOR EACH ROW EXECUTE FUNCTION insert_job();

CREATE FUNCTION refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  RAISE EXCEPTION USING ERRCODE = 'TN007', MESSAGE = 'jobs cannot be changed by ' || TG_OP,
    HINT = 'Use the functions cancel, retry, review_dead_letter, complete_manually, move_to_dead_letter.';
END $$ SET search_path FROM CURRENT;
CREATE TRIGGER refuse_change INSTEAD OF UPDATE OR DELETE ON jobs FOR EACH ROW EXECUTE FUNCTION refuse_change();

CREATE VIEW attempts AS
  SELECT a.job_id, a.run, a.attempt, a.worker AS worker_id, a.started_at, a.finished_at, a.outcome, a.applied, a.exit_code, a.http_status, a.error, a.log_tail
  FROM attempt a
UNION ALL
  -- The last attempt stands in the outcome that it brought about.
  SELECT o.id, o.run, o.attempts, o.worker, o.started_at, o.finished_at, o.status, true, o.exit_code, o.http_status, o.error, o.log_tail
  FROM outcome o WHERE o.token IS NOT NULL;
COMMENT ON VIEW attempts IS
  'One row for each attempt that ended. outcome: completed, failed, released (given back by a drain), snoozed, lost (its worker died). applied = false: it came after the run had lost its lease, and changed nothing.';

CREATE VIEW dead_letter_jobs AS
  SELECT d.id, d.job_id AS original_job_id, j.job_type, j.tenant AS tenant_id, coalesce((SELECT e.data FROM edit e WHERE e.id = d.job_id), j.data) AS data,
    d.attempts, d.last_error, d.failed_at, d.reviewed_by, d.reviewed_at, d.review_action, d.review_note
  FROM dead_letter d JOIN job j ON j.id = d.job_id;
COMMENT ON VIEW dead_letter_jobs IS 'One row for each death of a job; reviewed_at IS NULL: it waits for review (review_dead_letter).';

CREATE VIEW workers AS
  SELECT w.id, w.name, w.version, w.status, w.started_at, b.beat_at AS last_heartbeat, b.in_flight, w.concurrency, w.job_types, w.lease_ttl, w.drain_requested, w.ended_at
  FROM worker w JOIN beat b ON b.worker = w.id;
COMMENT ON VIEW workers IS 'Running daemons, and those that ended in the last day. status: live, draining, stopped, lost (no heartbeat within its lease_ttl).';

CREATE VIEW queue_metrics AS
  SELECT l.job_type, sum(x.pending)::bigint AS pending_count, sum(x.running)::bigint AS running_count, sum(x.failed)::bigint AS failed_count,
    sum(x.seconds) / nullif(sum(x.ended), 0) AS avg_duration_sec, max(x.oldest) AS oldest_pending_age_sec
  FROM lane l CROSS JOIN LATERAL (
    SELECT (SELECT count(*) FROM (SELECT FROM ready r WHERE r.lane = l.lane LIMIT 100000) c) AS pending,
      (SELECT count(*) FROM lease s WHERE s.lane = l.lane) AS running,
      (SELECT count(*) FROM (SELECT FROM dead_letter d WHERE d.lane = l.lane AND d.reviewed_at IS NULL LIMIT 100000) c) AS failed,
      (SELECT sum((b.stats -> l.lane::text ->> 0)::float8) FROM beat b JOIN worker w ON w.id = b.worker WHERE w.status IN ('live', 'draining')) AS ended,
      (SELECT sum((b.stats -> l.lane::text ->> 1)::float8) FROM beat b JOIN worker w ON w.id = b.worker WHERE w.status IN ('live', 'draining')) AS seconds,
      -- The heads of all priorities: from one priority to the next by the index.
      (WITH RECURSIVE head AS (
        (SELECT r.priority, r.ready_at FROM ready r WHERE r.lane = l.lane ORDER BY r.priority, r.pos LIMIT 1)
        UNION ALL
        SELECT n.priority, n.ready_at FROM head h CROSS JOIN LATERAL (
          SELECT r.priority, r.ready_at FROM ready r WHERE r.lane = l.lane AND r.priority > h.priority ORDER BY r.priority, r.pos LIMIT 1) n
      ) SELECT extract(epoch FROM clock_timestamp() - min(h.ready_at))::float8 FROM head h) AS oldest
  ) x GROUP BY l.job_type;
COMMENT ON VIEW queue_metrics IS
  'One row for each job type. pending_count and failed_count are exact up to 100,000 a lane, and then stay there. avg_duration_sec: of the runs that ended lately, as the workers say.';
