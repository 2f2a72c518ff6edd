-- breaking: no
-- Handlers whose effects are in this database, and durability for those who ask for more than this server's disk.

-- Bit 32 of lease.flags: the handler says after_lost_commits = "rerun", its effects are in this database. assert_lease then leaves
-- a row here, in the transaction that writes them. So whether they were lost in a switch is a fact that the new primary shows.
-- Bit 64: a re-attach found that they were lost. Until the worker has killed the handler the lease keeps others from the job, but no
-- transaction of that handler is let in any more: its effects would stay, and the job runs again.
CREATE TABLE effect (
  token uuid NOT NULL,
  xid bigint NOT NULL,              -- so that two transactions of one handler do not wait for each other
  job_id uuid NOT NULL,
  PRIMARY KEY (token, xid)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

CREATE OR REPLACE FUNCTION assert_lease(job_id uuid, token uuid, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_flags int;
BEGIN
  -- Whoever takes a lease away deletes this row or locks it FOR UPDATE, and so waits for, or passes by, the caller's transaction.
  SELECT l.flags INTO v_flags FROM lease l WHERE l.id = assert_lease.job_id AND l.token = assert_lease.token FOR KEY SHARE;
  IF NOT FOUND OR v_flags & 64 <> 0 THEN
    PERFORM refuse('TN006', format('job %s is no longer leased under this token', job_id),
      'Roll back: the job was given to another run, cancelled, or has ended.');
  ELSIF v_flags & 32 <> 0 THEN
    INSERT INTO effect (token, xid, job_id) VALUES (assert_lease.token, txid_current(), assert_lease.job_id) ON CONFLICT DO NOTHING;
  END IF;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION assert_lease(uuid, uuid, jsonb) IS
  'Raises unless the job is leased under this token, and keeps it so until the calling transaction ends. Call it once, in the transaction that writes all effects of the job: then those commit only if no other run took the job; and where its handler says after_lost_commits = "rerun" the job runs again after a switch exactly when that transaction was lost.';

-- For the transaction of the caller. It is never lowered, and what was not asked for is as the database is configured.
CREATE FUNCTION make_durable(p_durability text, p_repeatable boolean DEFAULT true) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  v_level text;
BEGIN
  IF p_durability IS NULL THEN RETURN; END IF;
  v_level := current_setting('synchronous_commit');
  IF p_durability = 'local' THEN
    IF v_level = 'off' THEN PERFORM set_config('synchronous_commit', 'local', true); END IF;
  ELSIF p_durability = 'replicated' THEN
    IF current_setting('synchronous_standby_names') = '' THEN
      PERFORM refuse('TN006', 'durability replicated cannot be given: this server has no synchronous standby (synchronous_standby_names is empty)',
        'Set up synchronous replication, or ask for durability local.');
    END IF;
    IF v_level NOT IN ('on', 'remote_apply') THEN PERFORM set_config('synchronous_commit', 'on', true); END IF;
    IF p_repeatable THEN
      -- A repeated statement may find all done and write nothing, and then its commit would not wait for what the first one wrote.
      PERFORM pg_logical_emit_message(true, 'tenure', '');
    END IF;
  ELSE
    PERFORM refuse('TN007', format('durability %L is none of local, replicated', p_durability));
  END IF;
END $$;
COMMENT ON FUNCTION make_durable(text, boolean) IS 'Makes the commit of the calling transaction wait for this server''s disk (local), or for that of a synchronous standby too (replicated).';

-- The same jobs; their commit is as durable as the most careful of them asks.
CREATE FUNCTION durable_jobs(p_jobs new_job[]) RETURNS new_job[] LANGUAGE plpgsql AS $$
BEGIN
  PERFORM make_durable((SELECT max(j.options ->> 'durability') FROM unnest(p_jobs) j WHERE j.options ->> 'durability' IN ('local', 'replicated')));
  RETURN p_jobs;
END $$;

CREATE OR REPLACE FUNCTION fault_in(p_jobs new_job[]) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT x.fault FROM (SELECT CASE
    WHEN j.job_type IS NULL THEN 'job_type is missing'
    WHEN length(j.job_type) NOT BETWEEN 1 AND 200 OR j.job_type ~ '[[:cntrl:]]|^[[:space:]]|[[:space:]]$' THEN
      'job_type ' || quote_literal(left(j.job_type, 60)) || ' must have 1 to 200 printable characters and no space at either end'
    WHEN j.job_type LIKE '%*%' THEN 'job_type ' || quote_literal(j.job_type) || ' has a *, which stands for any characters in handler names'
    WHEN j.tenant = '' OR length(j.tenant) > 200 THEN 'tenant must have 1 to 200 characters'
    WHEN j.unique_key = '' OR octet_length(j.unique_key) > 1000 THEN 'unique_key must have 1 to 1000 bytes'
    WHEN j.max_attempts < 1 THEN 'max_attempts is ' || j.max_attempts || ', but must be 1 or more'
    WHEN j.timeout < interval '1 ms' THEN 'timeout is ' || j.timeout || ', but must be a millisecond or more'
    WHEN j.run_at = 'infinity' THEN 'run_at is infinity: the job would never run'
    WHEN pg_column_size(j.data) > 16 * 1024 * 1024 THEN
      'data has ' || pg_column_size(j.data) || ' bytes, more than the limit of 16 MiB: put it elsewhere and enqueue a reference to it'
    WHEN jsonb_typeof(j.labels) <> 'object' OR pg_column_size(j.labels) > 16384 THEN 'labels must be a JSON object of at most 16 KiB'
    WHEN jsonb_typeof(j.options) <> 'object' THEN 'options must be a JSON object'
    WHEN j.options <> '{}' AND j.options - '{notify,traceparent,durability}'::text[] <> '{}' THEN
      'options has unknown keys: ' || (j.options - '{notify,traceparent,durability}'::text[])::text || ' (known: notify, traceparent, durability)'
    WHEN jsonb_typeof(j.options -> 'notify') <> 'boolean' THEN 'options.notify must be true or false'
    WHEN jsonb_typeof(j.options -> 'traceparent') <> 'string' OR j.options ->> 'traceparent' !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}'
      OR length(j.options ->> 'traceparent') > 256 THEN
      'options.traceparent is no W3C trace context (00-TRACE-PARENT-FLAGS, in small hexadecimal digits)'
    WHEN j.options ? 'durability' AND NOT j.options @> '{"durability": "local"}' AND NOT j.options @> '{"durability": "replicated"}' THEN
      'options.durability must be local or replicated'
    WHEN j.id IS NULL THEN NULL
    WHEN get_byte(uuid_send(j.id), 6) >> 4 <> 7 OR get_byte(uuid_send(j.id), 8) >> 6 <> 2 THEN
      'id ' || j.id || ' is not a UUIDv7; make one with tenure.uuid_v7() or leave it out'
    WHEN j.id > uuid_v7('ffffffff-ffff-4fff-bfff-ffffffffffff', now() + interval '1 day') THEN
      'id ' || j.id || ' is a UUIDv7 of more than a day in the future: the clock that made it is wrong'
  END AS fault FROM unnest(p_jobs) j) x WHERE x.fault IS NOT NULL LIMIT 1
$$;

CREATE OR REPLACE FUNCTION enqueue(
  job_type text, data jsonb DEFAULT '{}', priority int DEFAULT 0, run_at timestamptz DEFAULT now(), tenant text DEFAULT 'default',
  unique_key text DEFAULT NULL, max_attempts int DEFAULT NULL, timeout interval DEFAULT NULL, id uuid DEFAULT NULL,
  labels jsonb DEFAULT '{}', options jsonb DEFAULT '{}'
) RETURNS uuid LANGUAGE sql SECURITY DEFINER AS $$
  SELECT (put_jobs(durable_jobs(ARRAY[ROW($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)::new_job])))[1]
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION enqueue(text, jsonb, int, timestamptz, text, text, int, interval, uuid, jsonb, jsonb) IS
  'Puts a job in, in the caller''s transaction, and returns its id. With an id that is known it changes nothing and returns it; with a unique_key that a live job of this type and tenant owns it returns that job''s id. options: notify (false: wake nobody), traceparent, durability (local, or replicated: the commit waits for a synchronous standby).';

CREATE OR REPLACE FUNCTION enqueue_many(jobs jsonb, options jsonb DEFAULT '{}') RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_key text;
  v_jobs new_job[];
BEGIN
  PERFORM make_durable(options ->> 'durability');
  PERFORM assert_objects(jobs, 'jobs');
  SELECT k INTO v_key FROM jsonb_array_elements(jobs) e, jsonb_object_keys(e) k
    WHERE k NOT IN ('job_type', 'data', 'priority', 'run_at', 'tenant', 'unique_key', 'max_attempts', 'timeout', 'id', 'labels', 'options') LIMIT 1;
  IF FOUND THEN
    PERFORM refuse('TN007', 'unknown key ' || quote_literal(v_key) || ' in a job', 'The keys are the parameters of tenure.enqueue.');
  END IF;
  SELECT array_agg(j) INTO v_jobs FROM jsonb_populate_recordset(NULL::new_job, jobs) j;
  RETURN QUERY SELECT unnest(put_jobs(durable_jobs(v_jobs))) WHERE v_jobs IS NOT NULL;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION enqueue_many(jsonb, jsonb) IS
  'Puts many jobs in: a JSON array of objects whose keys are the parameters of enqueue. Returns their ids in order. One bad job refuses all. options: durability, for all of them.';

CREATE OR REPLACE FUNCTION insert_job() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
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
  NEW.id := (put_jobs(durable_jobs(ARRAY[ROW(NEW.job_type, NEW.data, NEW.priority, NEW.run_at, NEW.tenant_id, NEW.unique_key, NEW.max_attempts, NEW.timeout, NEW.id,
    NEW.labels, NEW.options)::new_job])))[1];
  RETURN NEW;
END $$ SET search_path FROM CURRENT;

-- Generic plans with index scans in order: the tables are empty at one moment and have millions of rows at the next, with statistics of neither.
CREATE OR REPLACE FUNCTION claim_job_batch(
  p_worker_id uuid, p_epoch uuid, p_call bigint, p_lanes int[], p_limits int[], p_total int DEFAULT NULL, p_max_attempts int[] DEFAULT NULL,
  p_mark_lanes int[] DEFAULT '{}', p_mark_priorities int[] DEFAULT '{}', p_marks bigint[] DEFAULT '{}', options jsonb DEFAULT '{}'
) RETURNS TABLE (
  id uuid, run int, token uuid, attempt int, max_attempts int, lane int, job_type text, tenant text, priority int, pos bigint,
  ready_at timestamptz, started_at timestamptz, created_at timestamptz, run_at timestamptz, timeout interval, unique_key text,
  flags smallint, data jsonb, labels jsonb, job_options jsonb
) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_worker worker;
  v_cluster cluster;
  v_after bigint := 0;      -- in a window only rows beyond this position, and none with a unique key or a doubtful id
  v_not smallint := 0;
  v_total int := coalesce(p_total, (SELECT sum(x) FROM unnest(p_limits) x), 0);
  v_segments segment[];
  v_taken int;
  -- Lanes whose handlers work in this database: their leases are marked (32).
  v_rerun int[] := ARRAY(SELECT jsonb_array_elements_text(options -> 'rerun')::int);
BEGIN
  PERFORM make_durable(options ->> 'durability', false);
  SELECT * INTO v_worker FROM worker WHERE id = p_worker_id;
  IF v_worker.status IS NULL OR v_worker.status NOT IN ('live', 'draining') THEN
    PERFORM refuse('TN004', format('worker %s is %s', p_worker_id, coalesce(v_worker.status, 'unknown')),
      'Stop all its handlers, then register under a new id.');
  END IF;
  IF p_call <= (SELECT b.settled FROM beat b WHERE b.worker = p_worker_id) THEN
    PERFORM refuse('TN006', format('claim call %s is settled: it came too late', p_call));
  END IF;
  IF cardinality(p_lanes) <> cardinality(p_limits) OR cardinality(p_max_attempts) <> cardinality(p_lanes) THEN
    PERFORM refuse('TN007', 'p_lanes, p_limits and p_max_attempts must have the same length');
  END IF;
  SELECT * INTO v_cluster FROM cluster;
  IF v_total <= 0 OR v_cluster.gate = 'hold' OR v_worker.status <> 'live' OR NOT (v_worker.admitted OR admit(v_worker)) THEN
    RETURN;
  END IF;
  IF v_cluster.gate = 'window' THEN
    v_after := v_cluster.mark;
    v_not := 1 | 16;
  END IF;
  v_segments := claim_plan(p_lanes, p_limits, v_total, p_mark_lanes, p_mark_priorities, p_marks, v_after, v_not);
  RETURN QUERY
    WITH head AS (
      SELECT h.place FROM unnest(v_segments) s CROSS JOIN LATERAL (
        SELECT r.ctid AS place FROM ready r
        WHERE r.lane = s.lane AND (r.priority, r.pos) > (s.priority, s.mark) AND r.priority <= s.last_priority
          AND r.pos > v_after AND r.flags & v_not = 0
        ORDER BY r.priority, r.pos LIMIT s.take FOR UPDATE SKIP LOCKED) h
    ), taken AS (
      DELETE FROM ready r WHERE r.ctid = ANY (ARRAY(SELECT h.place FROM head h)) RETURNING r.*
    ), again AS (
      DELETE FROM requeued q USING taken t WHERE t.flags & 2 <> 0 AND q.id = t.id
    ), picked AS MATERIALIZED (
      SELECT t.id, t.run + 1 AS run, random_uuid() AS token, t.attempts + 1 AS attempt, t.lane, t.priority, t.pos, t.ready_at,
        t.flags & 5 | CASE WHEN t.lane = ANY (v_rerun) THEN 32 ELSE 0 END AS flags,
        coalesce(j.max_attempts, p_max_attempts[array_position(p_lanes, t.lane)], 5) AS max_attempts, clock_timestamp() AS started_at,
        j.job_type, j.tenant, j.created_at, j.run_at, j.timeout, j.unique_key, j.labels, j.options,
        CASE WHEN t.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = t.id) END AS data
      FROM taken t JOIN job j ON j.id = t.id
    ), leased AS (
      INSERT INTO lease (id, token, worker, call, epoch_no, run, attempts, max_attempts, lane, priority, started_at, flags)
      SELECT p.id, p.token, p_worker_id, p_call, v_epoch_no, p.run, p.attempt, p.max_attempts, p.lane, p.priority, p.started_at, p.flags FROM picked p
    )
    SELECT p.id, p.run, p.token, p.attempt, p.max_attempts, p.lane, p.job_type, p.tenant, p.priority, p.pos, p.ready_at, p.started_at,
      p.created_at, p.run_at, p.timeout, p.unique_key, p.flags::smallint, p.data, p.labels, p.options
    FROM picked p ORDER BY p.priority, p.pos;
  GET DIAGNOSTICS v_taken = ROW_COUNT;
  IF v_taken > 0 AND v_cluster.gate = 'open' AND clock_timestamp() < v_cluster.opened_at + interval '1 hour' THEN
    UPDATE switch s SET first_claim_at = clock_timestamp()
      WHERE s.epoch_no = (SELECT n.epoch_no FROM switch n WHERE n.epoch_no = v_epoch_no AND n.first_claim_at IS NULL FOR UPDATE SKIP LOCKED);
  END IF;
  IF v_taken >= v_total THEN
    PERFORM wake_one(p_lanes, p_worker_id);  -- there is probably more than this worker can take
  END IF;
END $$ SET search_path FROM CURRENT
  SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
COMMENT ON FUNCTION claim_job_batch(uuid, uuid, bigint, int[], int[], int, int[], int[], int[], bigint[], jsonb) IS
  'Claims up to p_total jobs of these lanes, at most p_limits of each, lowest priority number first, then in the order in which they became ready. p_call: a number that grows with each call of this worker. p_max_attempts: for jobs that name none. p_marks: positions up to which nothing is left (see settle_marks). options: rerun, lanes whose handlers have their effects in this database (see assert_lease); durability: replicated waits for a synchronous standby.';

CREATE OR REPLACE FUNCTION finish(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_ends run_end[];
  v_bad text;
  v_incomplete boolean;
BEGIN
  PERFORM make_durable(options ->> 'durability');
  PERFORM assert_objects(p_items, 'the items');
  SELECT array_agg(e), min(coalesce(e.kind, 'NULL')) FILTER (WHERE e.kind IS NULL OR e.kind NOT IN ('completed', 'failed', 'released', 'snoozed')),
    bool_or(e.job IS NULL OR e.run IS NULL OR e.token IS NULL)
    INTO v_ends, v_bad, v_incomplete FROM jsonb_populate_recordset(NULL::run_end, p_items) e;
  IF v_bad IS NOT NULL THEN
    PERFORM refuse('TN007', 'kind ' || v_bad || ' is none of completed, failed, released, snoozed');
  ELSIF v_incomplete THEN
    PERFORM refuse('TN007', 'an item lacks job, run or token');
  END IF;
  RETURN QUERY SELECT a.job, a.run, a.token, a.answer, a.status FROM unnest(end_runs(p_worker_id, v_epoch_no, v_ends)) a;
END $$ SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off;
COMMENT ON FUNCTION finish(uuid, uuid, jsonb, jsonb) IS
  'Ends of runs of any kind in one call. Items: kind (completed | failed | released | snoozed), job, run, token, delay_ms (failed: until the next attempt; snoozed, released: until it is ready), final (failed: never again), exit_code, http_status, result, error, log_tail, enqueue (completed: follow-up jobs with ids). Answer for each: done; busy: the job is locked by another transaction, say it again; history: the run had lost its lease, nothing was changed. options: durability, replicated waits for a synchronous standby.';
