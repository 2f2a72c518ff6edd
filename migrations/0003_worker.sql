-- breaking: yes
-- What a worker says to be one: it opens epochs, registers, beats, claims, sleeps, leaves.

-- The gate, for every call of a worker. Returns the number of the present epoch.
CREATE FUNCTION assert_epoch(p_epoch uuid) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_epoch_no bigint;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    PERFORM refuse('TN007', 'tenure''s functions for workers need READ COMMITTED, this transaction is ' || upper(current_setting('transaction_isolation')));
  END IF;
  SELECT c.epoch_no INTO v_epoch_no FROM cluster c JOIN here h ON h.epoch = c.epoch WHERE c.epoch = p_epoch;
  IF NOT FOUND THEN
    PERFORM refuse('TN001', 'the database is in another epoch: its server was switched, restarted after a crash or restored',
      'Call open_epoch, then reattach with all jobs that you hold or have finished, then go on with the new epoch. Until each worker has done so, or its lease_ttl has passed, jobs from before are not claimed.');
  END IF;
  RETURN v_epoch_no;
END $$;
COMMENT ON FUNCTION assert_epoch(uuid) IS 'Raises TN001 unless this is the present epoch. Returns its number.';

-- Whoever comes first after a crash, a promotion or a restore opens the new epoch.
CREATE FUNCTION open_epoch(p_worker_id uuid, options jsonb DEFAULT '{}')
RETURNS TABLE (epoch uuid, epoch_no bigint, gate text, beat bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_old cluster;
  v_epoch uuid := random_uuid();
BEGIN
  SELECT * INTO v_old FROM cluster FOR UPDATE;
  IF NOT EXISTS (SELECT FROM here h WHERE h.epoch = v_old.epoch) THEN
    DELETE FROM here;
    DELETE FROM expected;
    INSERT INTO expected (worker, lease_ttl) SELECT w.id, w.lease_ttl FROM worker w WHERE w.status IN ('live', 'draining');
    IF NOT FOUND THEN
      -- A worker that came alone may be part of what was lost, and nobody else can name it: it is waited for under no name.
      INSERT INTO expected (worker, lease_ttl)
        SELECT '00000000-0000-0000-0000-000000000000', coalesce(max(w.lease_ttl), interval '60 s') FROM worker w;
    END IF;
    -- Only what stood in ready at this moment can have been claimed or finished in the lost tail.
    UPDATE cluster SET epoch = v_epoch, epoch_no = greatest(v_old.epoch_no, (options ->> 'epoch_no')::bigint) + 1,
      gate = CASE WHEN v_old.gate = 'hold' THEN 'hold' ELSE 'window' END,
      mark = nextval('ready_pos'), opened_at = clock_timestamp();
    INSERT INTO here (epoch) VALUES (v_epoch);
  END IF;
  RETURN QUERY SELECT c.epoch, c.epoch_no, c.gate, b.beat FROM cluster c LEFT JOIN beat b ON b.worker = p_worker_id;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION open_epoch(uuid, jsonb) IS
  'The present epoch, opened first if the last one ended in a crash, switch or restore; with the last beat of this worker that the database shows (NULL: it does not know the worker). options: epoch_no, the highest that the caller has seen.';

-- A worker comes: the others do not know of it before their next beat. One that is under way ends first, and the next one sees it.
-- This is kept as a fact, not as times to compare: clocks jump, and a beat can be renewed without anybody being told.
CREATE FUNCTION nobody_is_told() RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  -- All by id, and before the cluster row: whoever locks several of them does so in this order.
  PERFORM FROM beat b ORDER BY b.worker FOR UPDATE;
  UPDATE beat SET told = false WHERE told;
END $$;

CREATE FUNCTION register_worker(
  p_worker_id uuid, p_name text, p_version text, p_lease_ttl interval, p_heartbeat interval, p_job_types text[],
  p_concurrency int DEFAULT 1, options jsonb DEFAULT '{}'
) RETURNS TABLE (epoch uuid, epoch_no bigint, gate text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_now record;
BEGIN
  IF p_heartbeat IS NULL OR p_lease_ttl IS NULL OR p_heartbeat <= interval '0' OR p_heartbeat > p_lease_ttl / 3 THEN
    PERFORM refuse('TN007', format('heartbeat %s must be above zero and at most a third of lease_ttl %s', p_heartbeat, p_lease_ttl));
  END IF;
  PERFORM nobody_is_told();
  SELECT o.epoch, o.epoch_no, o.gate INTO v_now FROM open_epoch(p_worker_id) o;
  PERFORM assert_epoch(v_now.epoch);
  INSERT INTO beat (worker, beat, beat_at, settled, in_flight, told, stats) VALUES (p_worker_id, 0, clock_timestamp(), 0, 0, false, '{}');
  INSERT INTO worker (id, name, version, status, lease_ttl, heartbeat, job_types, concurrency, admitted, started_at)
    VALUES (p_worker_id, p_name, p_version, 'live', p_lease_ttl, p_heartbeat, p_job_types, p_concurrency, false, clock_timestamp());
  -- The others beat at once, learn of this one, and so would name it after a switch that loses this registration.
  PERFORM pg_notify(worker_channel(w.id), 'beat') FROM worker w WHERE w.status IN ('live', 'draining') AND w.id <> p_worker_id;
  RETURN QUERY SELECT v_now.epoch, v_now.epoch_no, v_now.gate;
EXCEPTION WHEN unique_violation THEN
  PERFORM refuse('TN007', 'worker id ' || p_worker_id || ' is known already: each start takes a new random id');
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION register_worker(uuid, text, text, interval, interval, text[], int, jsonb) IS
  'Makes a worker known under a new random id. p_job_types: patterns with * of what it can run. It claims first when all live workers have beaten since, at most 1.5 heartbeats later.';

CREATE FUNCTION heartbeat(
  p_worker_id uuid, p_epoch uuid, p_beat bigint, p_settled bigint DEFAULT 0, p_open bigint[] DEFAULT '{}', p_in_flight int DEFAULT 0,
  options jsonb DEFAULT '{}'
) RETURNS TABLE (workers jsonb, revoked jsonb, gate text, drain boolean, lanes int, ghosts int) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_worker worker;
  v_ghosts run_end[];
BEGIN
  -- The row lock first, then the status: recovery locks this row before it declares the worker lost.
  UPDATE beat SET beat = greatest(beat, p_beat), beat_at = clock_timestamp(), told = true, settled = greatest(settled, p_settled), in_flight = p_in_flight,
    stats = coalesce(options -> 'stats', '{}') WHERE worker = p_worker_id;
  SELECT * INTO v_worker FROM worker WHERE id = p_worker_id;
  IF v_worker.status IS NULL OR v_worker.status NOT IN ('live', 'draining') THEN
    PERFORM refuse('TN004', format('worker %s is %s', p_worker_id, coalesce(v_worker.status, 'unknown')),
      'Stop all its handlers, then register under a new id.');
  END IF;
  IF v_worker.status = 'live' AND (options ->> 'draining')::boolean THEN
    UPDATE worker SET status = 'draining' WHERE id = p_worker_id;
  END IF;
  -- Leases of a settled call that is not open come from a claim whose answer nobody read: nobody runs those jobs.
  SELECT array_agg(run_end_of(l, 'ghost')) INTO v_ghosts FROM (
    SELECT l.* FROM lease l WHERE l.worker = p_worker_id AND l.until IS NULL
      AND l.call <= p_settled AND NOT l.call = ANY (p_open) ORDER BY l.id FOR UPDATE SKIP LOCKED) l;
  IF v_ghosts IS NOT NULL THEN
    PERFORM end_runs(p_worker_id, v_epoch_no, v_ghosts);
  END IF;
  RETURN QUERY SELECT
    (SELECT jsonb_agg(jsonb_build_object('id', w.id, 'lease_ttl_ms', extract(epoch FROM w.lease_ttl) * 1000)) FROM worker w WHERE w.status IN ('live', 'draining')),
    (SELECT jsonb_agg(r) FROM (
      SELECT s.id AS job, l.token, s.kind AS reason FROM stop_request s JOIN lease l ON l.id = s.id WHERE l.worker = p_worker_id
      UNION ALL SELECT v.job_id, v.token, v.reason FROM revocation v WHERE v.worker = p_worker_id) r),
    (SELECT c.gate FROM cluster c), v_worker.drain_requested, (SELECT coalesce(max(l.lane), 0) FROM lane l), coalesce(cardinality(v_ghosts), 0);
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION heartbeat(uuid, uuid, bigint, bigint, bigint[], int, jsonb) IS
  'Renews the worker and with it all its leases. p_settled, p_open: all claim calls up to p_settled have been answered or given up, and of these p_open still have jobs that have not ended; jobs of the others go back. Answers with the live workers, with jobs that must be stopped, and with the highest lane. options: stats, draining.';

-- Alone, or when all other live workers have beaten since it registered, or after 1.5 heartbeats.
CREATE FUNCTION admit(w worker) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  IF clock_timestamp() < w.started_at + 1.5 * w.heartbeat AND EXISTS (
    SELECT FROM worker o JOIN beat b ON b.worker = o.id WHERE o.status IN ('live', 'draining') AND o.id <> w.id AND NOT b.told)
  THEN
    RETURN false;
  END IF;
  UPDATE worker SET admitted = true WHERE id = w.id AND status = 'live';
  RETURN FOUND;
END $$;

-- A stretch of one lane in ready: what lies behind (priority, mark) up to last_priority; take so many.
CREATE TYPE segment AS (lane int, priority int, mark bigint, last_priority int, take int);

CREATE FUNCTION claim_plan(
  p_lanes int[], p_limits int[], p_total int, p_mark_lanes int[], p_mark_priorities int[], p_marks bigint[], p_after bigint, p_not smallint
) RETURNS segment[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_segments segment[];
BEGIN
  -- A mark for (lane, priority) says where its live rows begin. Each starts a segment that reaches to the next marked priority,
  -- so a scan steps over no dead row below a mark, and still finds priorities that have no mark.
  SELECT array_agg(ROW(s.lane, s.priority, s.mark, coalesce(s.next_priority - 1, 2147483647), s.take)::segment) INTO v_segments
  FROM (
    SELECT l.lane, m.priority, m.mark, least(x.lim, p_total) AS take,
      lead(m.priority::bigint) OVER (PARTITION BY l.lane ORDER BY m.priority) AS next_priority
    FROM unnest(p_lanes, p_limits) x(lane, lim)
    JOIN lane l ON l.lane = x.lane AND l.paused_at IS NULL
    CROSS JOIN LATERAL (
      SELECT -2147483648 AS priority, 0::bigint AS mark
      UNION ALL
      SELECT k.priority, k.mark FROM unnest(p_mark_lanes, p_mark_priorities, p_marks) k(lane, priority, mark)
        WHERE k.lane = x.lane AND k.priority > -2147483648) m
    WHERE x.lim > 0
  ) s;
  IF cardinality(v_segments) > 1 THEN
    -- Several: how much of each is among the first p_total of all?
    SELECT array_agg(ROW(c.lane, c.segment_priority, c.mark, c.last_priority, c.take)::segment) INTO v_segments
    FROM (
      SELECT c.lane, c.segment_priority, c.mark, c.last_priority, count(*)::int AS take
      FROM (
        SELECT n.* FROM (
          SELECT s.lane, s.priority AS segment_priority, s.mark, s.last_priority, h.priority, h.pos, s.take AS lim,
            row_number() OVER (PARTITION BY s.lane ORDER BY h.priority, h.pos) AS nth
          FROM unnest(v_segments) s CROSS JOIN LATERAL (
            SELECT r.priority, r.pos FROM ready r
            WHERE r.lane = s.lane AND (r.priority, r.pos) > (s.priority, s.mark) AND r.priority <= s.last_priority
              AND r.pos > p_after AND r.flags & p_not = 0
            ORDER BY r.priority, r.pos LIMIT s.take) h
        ) n WHERE n.nth <= n.lim ORDER BY n.priority, n.pos LIMIT p_total
      ) c
      GROUP BY 1, 2, 3, 4
    ) c;
  END IF;
  RETURN v_segments;
END $$;

-- Generic plans with index scans in order: the tables are empty at one moment and have millions of rows at the next, with statistics of neither.
CREATE FUNCTION claim_job_batch(
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
BEGIN
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
      SELECT t.id, t.run + 1 AS run, random_uuid() AS token, t.attempts + 1 AS attempt, t.lane, t.priority, t.pos, t.ready_at, t.flags & 5 AS flags,
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
  IF v_taken >= v_total THEN
    PERFORM wake_one(p_lanes, p_worker_id);  -- there is probably more than this worker can take
  END IF;
END $$ SET search_path FROM CURRENT
  SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
COMMENT ON FUNCTION claim_job_batch(uuid, uuid, bigint, int[], int[], int, int[], int[], int[], bigint[], jsonb) IS
  'Claims up to p_total jobs of these lanes, at most p_limits of each, lowest priority number first, then in the order in which they became ready. p_call: a number that grows with each call of this worker. p_max_attempts: for jobs that name none. p_marks: positions up to which nothing is left (see settle_marks).';

CREATE FUNCTION settle_marks(p_epoch uuid, p_lanes int[], p_priorities int[], p_marks bigint[], p_seen bigint[], p_horizon bigint, options jsonb DEFAULT '{}')
RETURNS TABLE (lane int, priority int, mark bigint, horizon bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_snapshot txid_snapshot := txid_current_snapshot();
BEGIN
  PERFORM assert_epoch(p_epoch);
  -- A transaction that drew a lower position than one seen has a lower number than a transaction that begins after that was seen,
  -- such as this one, whose number is the horizon. So once all transactions below the horizon are
  -- over, nobody can commit a row below any more; and what is neither visible nor pending is gone. A claimed row whose claim is
  -- not committed is still visible here.
  RETURN QUERY SELECT k.lane, k.priority,
    CASE WHEN p_horizon > 0 AND txid_snapshot_xmin(v_snapshot) >= p_horizon THEN coalesce(
      (SELECT r.pos - 1 FROM ready r WHERE r.lane = k.lane AND r.priority = k.priority AND r.pos > k.mark AND r.pos <= k.seen
        ORDER BY r.pos LIMIT 1), k.seen)
    ELSE k.mark END,
    txid_current()
  FROM unnest(p_lanes, p_priorities, p_marks, p_seen) k(lane, priority, mark, seen);
END $$ SET search_path FROM CURRENT SET enable_seqscan = off SET enable_bitmapscan = off SET jit = off;
COMMENT ON FUNCTION settle_marks(uuid, int[], int[], bigint[], bigint[], bigint, jsonb) IS
  'Moves marks forward. p_seen: for each (lane, priority) the highest position that the worker had claimed when an earlier call of this function answered with p_horizon (0: never). Returns the new marks, and the horizon for positions seen before this call. A worker forgets its marks at a new epoch.';

CREATE FUNCTION lanes(options jsonb DEFAULT '{}') RETURNS TABLE (lane int, shard text, job_type text, paused boolean) LANGUAGE sql STABLE SECURITY DEFINER AS $$
  SELECT l.lane, l.shard, l.job_type, l.paused_at IS NOT NULL FROM lane l ORDER BY l.lane
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION lanes(jsonb) IS 'All lanes: one for each shard and job type that ever had a job.';

CREATE FUNCTION set_sleeping(p_worker_id uuid, p_epoch uuid, p_lanes int[], options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  PERFORM assert_epoch(p_epoch);
  IF cardinality(p_lanes) > 0 THEN
    INSERT INTO sleeper (worker, lanes) VALUES (p_worker_id, p_lanes) ON CONFLICT (worker) DO UPDATE SET lanes = excluded.lanes;
  ELSE
    DELETE FROM sleeper WHERE worker = p_worker_id;
  END IF;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION set_sleeping(uuid, uuid, int[], jsonb) IS
  'From now on notify this worker (channel: worker_channel) of jobs in these lanes; an empty array ends it. Commit, then claim once more, then sleep: what came in between is found so.';
