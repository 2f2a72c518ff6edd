-- breaking: yes
-- Enqueue: one job, many, and a plain INSERT all pass through put_jobs.
--
-- In all files: a function that users call has its search_path pinned and, where it writes, is SECURITY DEFINER. The functions that
-- only those call have neither (each SET costs some microseconds), and nobody else may execute them (see the roles, in the last file).

-- Errors of our own have SQLSTATE TNxxx:
--   TN001 another epoch: attach to the present one first      TN005 no such job, dead letter or worker
--   TN002 re-attaching after a switch: try again in a moment  TN006 refused by the present state
--   TN003 the gate is on hold: a person must decide           TN007 input refused
--   TN004 the worker is unknown or was declared dead
CREATE FUNCTION refuse(p_code text, p_message text, p_hint text DEFAULT NULL) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF p_hint IS NULL THEN
    RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message;
  END IF;
  RAISE EXCEPTION USING ERRCODE = p_code, MESSAGE = p_message, HINT = p_hint;
END $$;
COMMENT ON FUNCTION refuse(text, text, text) IS 'Raises an error of tenure, with what to do as its hint.';

CREATE FUNCTION lane_of(p_job_type text, p_shard text DEFAULT 'default') RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  v_lane int;
BEGIN
  LOOP
    -- Looked up before it is inserted: an INSERT that conflicts burns a value of a 32-bit sequence.
    SELECT l.lane INTO v_lane FROM lane l WHERE l.job_type = p_job_type AND l.shard = p_shard;
    IF FOUND THEN RETURN v_lane; END IF;
    INSERT INTO lane (job_type, shard) VALUES (p_job_type, p_shard) ON CONFLICT DO NOTHING;
    IF FOUND THEN
      PERFORM pg_notify(worker_channel(w.id), 'lanes') FROM worker w WHERE w.status = 'live';
    END IF;
  END LOOP;
END $$;
COMMENT ON FUNCTION lane_of(text, text) IS 'The lane of a job type in a shard; made when it is new, and workers are told.';

CREATE FUNCTION worker_channel(p_worker_id uuid) RETURNS text LANGUAGE sql IMMUTABLE AS $$ SELECT 'tenure_' || p_worker_id::text $$;
COMMENT ON FUNCTION worker_channel(uuid) IS 'The NOTIFY channel of one worker. Payloads: work, beat, lanes. They are hints: a worker that misses one finds out by itself.';

CREATE TYPE new_job AS (
  job_type text, data jsonb, priority int, run_at timestamptz, tenant text, unique_key text, max_attempts int, timeout interval,
  id uuid, labels jsonb, options jsonb
);

-- What is wrong with the first bad one of jobs that somebody wants to enqueue; NULL: nothing. All in one statement: a function
-- called for each row would cost more than the rest of the enqueue.
CREATE FUNCTION fault_in(p_jobs new_job[]) RETURNS text LANGUAGE sql STABLE AS $$
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
    WHEN j.options <> '{}' AND j.options - '{notify,traceparent}'::text[] <> '{}' THEN
      'options has unknown keys: ' || (j.options - '{notify,traceparent}'::text[])::text || ' (known: notify, traceparent)'
    WHEN jsonb_typeof(j.options -> 'notify') <> 'boolean' THEN 'options.notify must be true or false'
    WHEN jsonb_typeof(j.options -> 'traceparent') <> 'string' OR j.options ->> 'traceparent' !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}'
      OR length(j.options ->> 'traceparent') > 256 THEN
      'options.traceparent is no W3C trace context (00-TRACE-PARENT-FLAGS, in small hexadecimal digits)'
    WHEN j.id IS NULL THEN NULL
    WHEN get_byte(uuid_send(j.id), 6) >> 4 <> 7 OR get_byte(uuid_send(j.id), 8) >> 6 <> 2 THEN
      'id ' || j.id || ' is not a UUIDv7; make one with tenure.uuid_v7() or leave it out'
    WHEN j.id > uuid_v7('ffffffff-ffff-4fff-bfff-ffffffffffff', now() + interval '1 day') THEN
      'id ' || j.id || ' is a UUIDv7 of more than a day in the future: the clock that made it is wrong'
  END AS fault FROM unnest(p_jobs) j) x WHERE x.fault IS NOT NULL LIMIT 1
$$;
COMMENT ON FUNCTION fault_in(new_job[]) IS 'What is wrong with jobs to be enqueued, or NULL.';

CREATE FUNCTION put_jobs(p_jobs new_job[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
  v_fault text := fault_in(p_jobs);
  v_ids uuid[];
  v_keyed boolean;
  v_tenants text[];
  v_types text[];
  -- Until all workers have re-attached, an enqueue with an id may repeat one that was lost, of a job that a worker still holds.
  v_doubtful uuid[] := CASE WHEN NOT EXISTS (SELECT FROM cluster c JOIN here h ON h.epoch = c.epoch WHERE c.gate = 'open')
    THEN ARRAY(SELECT j.id FROM unnest(p_jobs) j WHERE j.id IS NOT NULL) END;
BEGIN
  IF v_fault IS NOT NULL THEN
    PERFORM refuse('TN007', v_fault);
  END IF;
  SELECT array_agg(coalesce(j.id, uuid_v7()) ORDER BY j.n), bool_or(j.unique_key IS NOT NULL),
    array_agg(DISTINCT coalesce(j.tenant, 'default')), array_agg(DISTINCT j.job_type)
    INTO v_ids, v_keyed, v_tenants, v_types
    FROM unnest(p_jobs) WITH ORDINALITY j(job_type, data, priority, run_at, tenant, unique_key, max_attempts, timeout, id, labels, options, n);
  PERFORM assert_tenants(v_tenants);
  -- The transaction has its number before it draws a position: only so may claimers trust that whoever drew a position lower
  -- than one they see was already running then (see settle_marks).
  PERFORM txid_current();
  PERFORM lane_of(t.job_type) FROM unnest(v_types) t(job_type)
    WHERE NOT EXISTS (SELECT FROM lane l WHERE l.job_type = t.job_type AND l.shard = 'default');
  IF v_keyed THEN
    v_ids := take_keys(p_jobs, v_ids);
  END IF;
  WITH input AS MATERIALIZED (
    -- Of several with one id, and of those whose key another job owns, only the first that has its own id is put in.
    SELECT DISTINCT ON (j.own_id) j.own_id AS id, j.*, coalesce(j.run_at, '-infinity') <= now() AS due, l.lane
    FROM ROWS FROM (unnest(p_jobs), unnest(v_ids)) WITH ORDINALITY
      j(job_type, data, priority, run_at, tenant, unique_key, max_attempts, timeout, given, labels, options, own_id, n)
    JOIN lane l ON l.job_type = j.job_type AND l.shard = 'default'
    ORDER BY j.own_id, j.n
  ), placed AS (
    SELECT o.*, CASE WHEN o.due THEN nextval('ready_pos') END AS pos FROM (SELECT * FROM input ORDER BY n) o
  ), new AS (
    INSERT INTO job (id, created_at, lane, priority, pos, run_at, max_attempts, timeout, job_type, tenant, unique_key, data, labels, options)
    SELECT id, now(), lane, coalesce(priority, 0), pos, CASE WHEN due THEN now() ELSE run_at END, max_attempts, timeout, job_type,
      coalesce(tenant, 'default'), unique_key, coalesce(data, '{}'), coalesce(labels, '{}'), coalesce(options, '{}')
    FROM placed ORDER BY id  -- so that two transactions with the same ids cannot wait for each other in a circle
    ON CONFLICT (id) DO NOTHING
    RETURNING id, lane, priority, pos, run_at, unique_key, options
  ), now_ready AS (
    -- One wake-up for each lane is enough, and the first row of each lane carries it.
    INSERT INTO ready (lane, priority, pos, id, run, attempts, flags, ready_at)
    SELECT lane, priority, pos, id, 0, 0,
      CASE WHEN unique_key IS NULL THEN 0 ELSE 1 END
      | CASE WHEN row_number() OVER (PARTITION BY lane ORDER BY pos) = 1 AND options -> 'notify' IS DISTINCT FROM 'false' THEN 8 ELSE 0 END
      | CASE WHEN id = ANY (v_doubtful) THEN 16 ELSE 0 END,
      now()
    FROM new WHERE pos IS NOT NULL
  )
  INSERT INTO later (id, due, waits_for, lane, priority, run, attempts, flags)
  SELECT id, run_at, 'time', lane, priority, 0, 0, CASE WHEN unique_key IS NULL THEN 0 ELSE 1 END FROM new WHERE pos IS NULL;
  IF v_keyed THEN
    -- A key taken for an id that another transaction put in meanwhile, without this key, has no job: it would be taken for ever.
    DELETE FROM key_owner k USING unnest(v_ids) i, job j
      WHERE k.id = i AND j.id = i AND (j.job_type, j.tenant, j.unique_key) IS DISTINCT FROM (k.job_type, k.tenant, k.key);
  END IF;
  RETURN v_ids;
END $$;
COMMENT ON FUNCTION put_jobs(new_job[]) IS 'Puts jobs in and returns an id for each, in order: the job''s own, or that of the live job that owns its unique key.';

-- Takes the unique keys of jobs that are about to be put in. Returns p_ids with the owner's id where a key has an owner.
CREATE FUNCTION take_keys(p_jobs new_job[], p_ids uuid[]) RETURNS uuid[] LANGUAGE plpgsql AS $$
DECLARE
  v_ids uuid[] := p_ids;
  -- Of several with one id the first counts, and all get its answer.
  v_first int[] := ARRAY(SELECT min(i.n::int) OVER (PARTITION BY i.id) FROM unnest(p_ids) WITH ORDINALITY i(id, n) ORDER BY i.n);
  v_owner uuid;
  r record;
BEGIN
  -- Sorted, so that two transactions with the same keys cannot wait for each other in a circle.
  FOR r IN
    SELECT j.job_type, coalesce(j.tenant, 'default') AS tenant, j.unique_key, j.n::int AS n, j.id IS NOT NULL AS given
    FROM unnest(p_jobs) WITH ORDINALITY j(job_type, data, priority, run_at, tenant, unique_key, max_attempts, timeout, id, labels, options, n)
    WHERE j.unique_key IS NOT NULL ORDER BY 1, 2, 3, 4
  LOOP
    -- A repeated id is answered by itself, also when the job ended long ago and its key has another owner.
    CONTINUE WHEN v_first[r.n] < r.n OR EXISTS (SELECT FROM job WHERE id = v_ids[r.n]);
    LOOP
      INSERT INTO key_owner (job_type, tenant, key, id) VALUES (r.job_type, r.tenant, r.unique_key, v_ids[r.n]) ON CONFLICT DO NOTHING;
      IF FOUND THEN
        -- A job of this id was put in, and has ended, while we waited for its key: it needs the key no more.
        IF r.given THEN
          DELETE FROM key_owner k WHERE k.job_type = r.job_type AND k.tenant = r.tenant AND k.key = r.unique_key AND EXISTS (SELECT FROM job WHERE id = v_ids[r.n]);
        END IF;
        EXIT;
      END IF;
      SELECT k.id INTO v_owner FROM key_owner k WHERE k.job_type = r.job_type AND k.tenant = r.tenant AND k.key = r.unique_key;
      IF FOUND THEN
        v_ids[r.n] := v_owner;
        EXIT;
      END IF;  -- the owner ended between the two statements
    END LOOP;
  END LOOP;
  RETURN ARRAY(SELECT v_ids[f.first] FROM unnest(v_first) WITH ORDINALITY f(first, n) ORDER BY f.n);
END $$;

CREATE FUNCTION enqueue(
  job_type text, data jsonb DEFAULT '{}', priority int DEFAULT 0, run_at timestamptz DEFAULT now(), tenant text DEFAULT 'default',
  unique_key text DEFAULT NULL, max_attempts int DEFAULT NULL, timeout interval DEFAULT NULL, id uuid DEFAULT NULL,
  labels jsonb DEFAULT '{}', options jsonb DEFAULT '{}'
) RETURNS uuid LANGUAGE sql SECURITY DEFINER AS $$
  SELECT (put_jobs(ARRAY[ROW($1, $2, $3, $4, $5, $6, $7, $8, $9, $10, $11)::new_job]))[1]
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION enqueue(text, jsonb, int, timestamptz, text, text, int, interval, uuid, jsonb, jsonb) IS
  'Puts a job in, in the caller''s transaction, and returns its id. With an id that is known it changes nothing and returns it; with a unique_key that a live job of this type and tenant owns it returns that job''s id. options: notify (false: wake nobody), traceparent.';

CREATE FUNCTION assert_objects(p_items jsonb, p_what text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  IF jsonb_typeof(p_items) = 'array' THEN
    IF NOT jsonb_path_exists(p_items, 'strict $[*] ? (@.type() != "object")') THEN RETURN; END IF;
  END IF;
  PERFORM refuse('TN007', p_what || ' must be a JSON array of objects');
END $$;
COMMENT ON FUNCTION assert_objects(jsonb, text) IS 'Raises TN007 unless it is a JSON array of objects.';

CREATE FUNCTION enqueue_many(jobs jsonb, options jsonb DEFAULT '{}') RETURNS SETOF uuid LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_key text;
  v_jobs new_job[];
BEGIN
  PERFORM assert_objects(jobs, 'jobs');
  SELECT k INTO v_key FROM jsonb_array_elements(jobs) e, jsonb_object_keys(e) k
    WHERE k NOT IN ('job_type', 'data', 'priority', 'run_at', 'tenant', 'unique_key', 'max_attempts', 'timeout', 'id', 'labels', 'options') LIMIT 1;
  IF FOUND THEN
    PERFORM refuse('TN007', 'unknown key ' || quote_literal(v_key) || ' in a job', 'The keys are the parameters of tenure.enqueue.');
  END IF;
  SELECT array_agg(j) INTO v_jobs FROM jsonb_populate_recordset(NULL::new_job, jobs) j;
  RETURN QUERY SELECT unnest(put_jobs(v_jobs)) WHERE v_jobs IS NOT NULL;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION enqueue_many(jsonb, jsonb) IS
  'Puts many jobs in: a JSON array of objects whose keys are the parameters of enqueue. Returns their ids in order. One bad job refuses all.';

-- Wakes one sleeping worker that takes this lane. It runs at commit: a decision taken at the insert would miss a worker that
-- falls asleep while the transaction is still open.
CREATE FUNCTION wake_one(p_lanes int[], p_but uuid DEFAULT NULL) RETURNS void LANGUAGE sql AS $$
  SELECT pg_notify(worker_channel(s.worker), 'work') FROM (
    SELECT s.worker FROM sleeper s JOIN beat b ON b.worker = s.worker JOIN worker w ON w.id = s.worker
    WHERE s.lanes && p_lanes AND s.worker IS DISTINCT FROM p_but AND b.beat_at > clock_timestamp() - 3 * w.heartbeat
    ORDER BY random() LIMIT 1) s
$$;
COMMENT ON FUNCTION wake_one(int[], uuid) IS 'Notifies one sleeping worker that takes one of these lanes. NOTIFY takes a lock that all notifying commits share, so nobody is notified while nobody sleeps.';

CREATE FUNCTION wake_at_commit() RETURNS trigger LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  PERFORM wake_one(ARRAY[NEW.lane]);
  RETURN NULL;
END $$ SET search_path FROM CURRENT;
CREATE CONSTRAINT TRIGGER wake AFTER INSERT ON ready DEFERRABLE INITIALLY DEFERRED
  FOR EACH ROW WHEN ((NEW.flags & 8) <> 0) EXECUTE FUNCTION wake_at_commit();
