-- breaking: no
-- A result can move the watermark of the series that its job belongs to.

-- How far a series of jobs has come: what the handler of the next one gets, and the result of each may move. A job names its series by
-- options.watermark. epoch_no: of the run that set it, so that an older end that a switch brings back does not move it back.
CREATE TABLE watermark (
  tenant text NOT NULL,
  name text NOT NULL,
  value jsonb NOT NULL,
  job_id uuid NOT NULL,
  epoch_no bigint NOT NULL,
  set_at timestamptz NOT NULL,
  PRIMARY KEY (tenant, name)
);
CREATE VIEW watermarks AS
  SELECT w.tenant AS tenant_id, w.name, w.value, w.job_id, w.set_at FROM watermark w;
COMMENT ON VIEW watermarks IS 'How far each series of jobs (options.watermark) has come, and which job moved it there.';

-- Completions that count move the watermarks of their series. By name, since several transactions may move the same ones; of several
-- completions in one call the last counts.
CREATE FUNCTION move_watermarks(p_items jsonb, p_answers end_answer[]) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  v_moved record;
BEGIN
  IF NOT p_items @? '$[*].watermark' THEN RETURN; END IF;
  FOR v_moved IN
    SELECT DISTINCT ON (j.tenant, j.options ->> 'watermark') j.tenant, j.options ->> 'watermark' AS name, i.item -> 'watermark' AS value, o.id, o.epoch_no
    FROM jsonb_array_elements(p_items) WITH ORDINALITY i(item, nth)
      JOIN unnest(p_answers) a ON a.job = (i.item ->> 'job')::uuid AND a.token = (i.item ->> 'token')::uuid AND a.fresh AND a.status = 'completed'
      JOIN outcome o ON o.id = a.job JOIN job j ON j.id = a.job
    WHERE i.item ->> 'kind' = 'completed' AND i.item ->> 'watermark' IS NOT NULL AND j.options ? 'watermark'
    ORDER BY 1, 2, o.epoch_no DESC, i.nth DESC
  LOOP
    INSERT INTO watermark (tenant, name, value, job_id, epoch_no, set_at)
      VALUES (v_moved.tenant, v_moved.name, v_moved.value, v_moved.id, v_moved.epoch_no, clock_timestamp())
      ON CONFLICT (tenant, name) DO UPDATE SET value = excluded.value, job_id = excluded.job_id, epoch_no = excluded.epoch_no, set_at = excluded.set_at
      WHERE excluded.epoch_no >= watermark.epoch_no;
  END LOOP;
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
    WHEN j.options <> '{}' AND j.options - '{notify,traceparent,durability,watermark}'::text[] <> '{}' THEN
      'options has unknown keys: ' || (j.options - '{notify,traceparent,durability,watermark}'::text[])::text || ' (known: notify, traceparent, durability, watermark)'
    WHEN jsonb_typeof(j.options -> 'notify') <> 'boolean' THEN 'options.notify must be true or false'
    WHEN jsonb_typeof(j.options -> 'traceparent') <> 'string' OR j.options ->> 'traceparent' !~ '^[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}'
      OR length(j.options ->> 'traceparent') > 256 THEN
      'options.traceparent is no W3C trace context (00-TRACE-PARENT-FLAGS, in small hexadecimal digits)'
    WHEN j.options ? 'durability' AND NOT j.options @> '{"durability": "local"}' AND NOT j.options @> '{"durability": "replicated"}' THEN
      'options.durability must be local or replicated'
    WHEN jsonb_typeof(j.options -> 'watermark') <> 'string' OR length(j.options ->> 'watermark') NOT BETWEEN 1 AND 200 THEN
      'options.watermark must be the name of a series of jobs, 1 to 200 characters'
    WHEN j.id IS NULL THEN NULL
    WHEN get_byte(uuid_send(j.id), 6) >> 4 <> 7 OR get_byte(uuid_send(j.id), 8) >> 6 <> 2 THEN
      'id ' || j.id || ' is not a UUIDv7; make one with tenure.uuid_v7() or leave it out'
    WHEN j.id > uuid_v7('ffffffff-ffff-4fff-bfff-ffffffffffff', now() + interval '1 day') THEN
      'id ' || j.id || ' is a UUIDv7 of more than a day in the future: the clock that made it is wrong'
  END AS fault FROM unnest(p_jobs) j) x WHERE x.fault IS NOT NULL LIMIT 1
$$;

COMMENT ON FUNCTION enqueue(text, jsonb, int, timestamptz, text, text, int, interval, uuid, jsonb, jsonb) IS
  'Puts a job in, in the caller''s transaction, and returns its id. With an id that is known it changes nothing and returns it; with a unique_key that a live job of this type and tenant owns it returns that job''s id. options: notify (false: wake nobody), traceparent, durability (local, or replicated: the commit waits for a synchronous standby), watermark (the name of the series whose watermark the handler gets and may move).';

-- Generic plans with index scans in order: the tables are empty at one moment and have millions of rows at the next, with statistics of neither.
DROP FUNCTION claim_job_batch(uuid, uuid, bigint, int[], int[], int, int[], int[], int[], bigint[], jsonb);
CREATE FUNCTION claim_job_batch(
  p_worker_id uuid, p_epoch uuid, p_call bigint, p_lanes int[], p_limits int[], p_total int DEFAULT NULL, p_max_attempts int[] DEFAULT NULL,
  p_mark_lanes int[] DEFAULT '{}', p_mark_priorities int[] DEFAULT '{}', p_marks bigint[] DEFAULT '{}', options jsonb DEFAULT '{}'
) RETURNS TABLE (
  id uuid, run int, token uuid, attempt int, max_attempts int, lane int, job_type text, tenant text, priority int, pos bigint,
  ready_at timestamptz, started_at timestamptz, created_at timestamptz, run_at timestamptz, timeout interval, unique_key text,
  flags smallint, data jsonb, labels jsonb, job_options jsonb, watermark jsonb
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
        t.flags & 133 | CASE WHEN t.lane = ANY (v_rerun) THEN 32 ELSE 0 END AS flags,
        coalesce(j.max_attempts, p_max_attempts[array_position(p_lanes, t.lane)], 5) AS max_attempts, clock_timestamp() AS started_at,
        j.job_type, j.tenant, j.created_at, j.run_at, j.timeout, j.unique_key, j.labels, j.options,
        CASE WHEN t.flags & 4 = 0 THEN j.data ELSE (SELECT e.data FROM edit e WHERE e.id = t.id) END AS data,
        CASE WHEN j.options ? 'watermark' THEN (SELECT w.value FROM watermark w WHERE w.tenant = j.tenant AND w.name = j.options ->> 'watermark') END AS watermark
      FROM taken t JOIN job j ON j.id = t.id
    ), leased AS (
      INSERT INTO lease (id, token, worker, call, epoch_no, run, attempts, max_attempts, lane, priority, started_at, flags)
      SELECT p.id, p.token, p_worker_id, p_call, v_epoch_no, p.run, p.attempt, p.max_attempts, p.lane, p.priority, p.started_at, p.flags FROM picked p
    )
    SELECT p.id, p.run, p.token, p.attempt, p.max_attempts, p.lane, p.job_type, p.tenant, p.priority, p.pos, p.ready_at, p.started_at,
      p.created_at, p.run_at, p.timeout, p.unique_key, p.flags::smallint, p.data, p.labels, p.options, p.watermark
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
  'Claims up to p_total jobs of these lanes, at most p_limits of each, lowest priority number first, then in the order in which they became ready. p_call: a number that grows with each call of this worker. p_max_attempts: for jobs that name none. p_marks: positions up to which nothing is left (see settle_marks). options: rerun, lanes whose handlers have their effects in this database (see assert_lease); durability: replicated waits for a synchronous standby. In the answer, flags with 128: the job is to run in a process that has no other; watermark: how far its series has come (options.watermark of the job).';

CREATE OR REPLACE FUNCTION finish(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_ends run_end[];
  v_answers end_answer[];
  v_bad text;
  v_incomplete boolean;
BEGIN
  PERFORM make_durable(options ->> 'durability');
  PERFORM assert_objects(p_items, 'the items');
  SELECT array_agg(e), min(coalesce(e.kind, 'NULL')) FILTER (WHERE e.kind IS NULL OR e.kind NOT IN ('completed', 'failed', 'released', 'crashed', 'snoozed')),
    bool_or(e.job IS NULL OR e.run IS NULL OR e.token IS NULL)
    INTO v_ends, v_bad, v_incomplete FROM jsonb_populate_recordset(NULL::run_end, p_items) e;
  IF v_bad IS NOT NULL THEN
    PERFORM refuse('TN007', 'kind ' || v_bad || ' is none of completed, failed, released, crashed, snoozed');
  ELSIF v_incomplete THEN
    PERFORM refuse('TN007', 'an item lacks job, run or token');
  END IF;
  IF EXISTS (SELECT FROM given_up) THEN
    -- The handler ended before it could be stopped, perhaps because assert_lease refused it, or its end was on the way: its effects are
    -- lost all the same, and its job runs again.
    v_ends := ARRAY(SELECT CASE WHEN e.kind IN ('completed', 'failed') AND EXISTS (SELECT FROM given_up g WHERE g.token = e.token)
      THEN ROW('released', e.job, e.run, e.token, NULL, false, NULL, NULL, NULL, NULL, NULL, NULL)::run_end ELSE e END FROM unnest(v_ends) e);
  END IF;
  v_answers := end_runs(p_worker_id, v_epoch_no, v_ends);
  PERFORM move_watermarks(p_items, v_answers);
  RETURN QUERY SELECT a.job, a.run, a.token, a.answer, a.status FROM unnest(v_answers) a;
END $$ SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off;

COMMENT ON FUNCTION finish(uuid, uuid, jsonb, jsonb) IS
  'Ends of runs of any kind in one call. Items: kind (completed | failed | released | crashed | snoozed), job, run, token, delay_ms (failed: until the next attempt; snoozed, released, crashed: until it is ready), final (failed: never again), exit_code, http_status, result, error, log_tail, enqueue (completed: follow-up jobs with ids), watermark (completed: how far the job''s series has come). crashed: the process that had this job and others died; the job goes back as released, and runs alone from then on. Answer for each: done; busy: the job is locked by another transaction, say it again; history: the run had lost its lease, nothing was changed. options: durability, replicated waits for a synchronous standby.';

CREATE OR REPLACE FUNCTION reattach(p_worker_id uuid, p_epoch uuid, p_beat bigint, statements jsonb, roster uuid[] DEFAULT '{}', options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_alive boolean;
  v_predecessors uuid[] := ARRAY(SELECT jsonb_array_elements_text(options -> 'predecessors')::uuid);
  v_kind text;
  v_bad text;
  v_item jsonb;
  s run_statement;
  v_ends run_end[];
  v_end run_end;
  v_answers end_answer[];
  v_all end_answer[] := '{}';
  v_done end_answer;
  v_answer text;
  v_lost boolean;
  v_refused text;
  v_ghosts run_end[];
  -- Something is still to be said: more statements follow in another call, or one met a lock and is said again. The worker has not
  -- spoken then, and the database shows no beat of it that it has not shown before.
  v_unsaid boolean := coalesce((options ->> 'more')::boolean, false);
  v_held uuid[] := ARRAY(SELECT jsonb_array_elements_text(options -> 'held')::uuid);
  v_without_primary interval := (options ->> 'without_primary_ms')::bigint * interval '1 ms';
  v_uncovered record;
  v_confirmed uuid[] := '{}';  -- their ends had been answered before
  v_rerun uuid[] := '{}';      -- their effects were lost
BEGIN
  PERFORM assert_objects(statements, 'statements');
  SELECT min(coalesce(x.kind, 'NULL')) INTO v_bad FROM jsonb_populate_recordset(NULL::run_statement, statements) x
    WHERE x.kind IS NULL OR x.kind NOT IN ('hold', 'completed', 'failed', 'released', 'crashed', 'snoozed') OR x.job IS NULL OR x.run IS NULL OR x.token IS NULL OR x.attempt IS NULL
      OR x.kind = 'hold' AND x.call IS NULL OR x."row" ->> 'job_type' IS NULL AND x."row" IS NOT NULL;
  IF v_bad IS NOT NULL THEN
    PERFORM refuse('TN007', 'a statement (kind ' || v_bad || ') lacks job, run, token, attempt, call (hold) or the job_type of its row, or has an unknown kind');
  END IF;
  -- Beats first, by id: recovery passes by whoever is speaking.
  IF options ? 'name' AND NOT EXISTS (SELECT FROM worker w WHERE w.id = p_worker_id) THEN
    PERFORM nobody_is_told();
    IF p_worker_id = ANY (roster) THEN
      -- It was there before what was lost, and a heartbeat told it who the others are: it knows all that could claim.
      UPDATE expected SET spoken_at = clock_timestamp() WHERE worker = '00000000-0000-0000-0000-000000000000';
    END IF;
  END IF;
  PERFORM FROM beat b WHERE b.worker = p_worker_id OR b.worker = ANY (v_predecessors) ORDER BY b.worker FOR UPDATE;
  SELECT * INTO v_uncovered FROM uncovered_span(options -> 'covers');
  IF v_uncovered.until IS NOT NULL THEN
    UPDATE cluster SET uncovered = true, gate = 'hold' WHERE NOT uncovered;
  END IF;
  UPDATE beat SET beat_at = clock_timestamp() WHERE worker = p_worker_id;
  -- Its registration may be part of what was lost.
  INSERT INTO beat (worker, beat, beat_at, settled, in_flight, told, stats)
    SELECT p_worker_id, 0, clock_timestamp(), 0, 0, false, '{}'
    WHERE options ? 'name' ON CONFLICT (worker) DO NOTHING;
  INSERT INTO worker (id, name, version, status, lease_ttl, heartbeat, job_types, concurrency, admitted, started_at)
    SELECT p_worker_id, options ->> 'name', coalesce(options ->> 'version', ''), 'live', (options ->> 'lease_ttl_ms')::bigint * interval '1 ms',
      (options ->> 'heartbeat_ms')::bigint * interval '1 ms', ARRAY(SELECT jsonb_array_elements_text(options -> 'job_types')),
      coalesce((options ->> 'concurrency')::int, 1), false, clock_timestamp()
    WHERE options ? 'name' ON CONFLICT (id) DO NOTHING;
  v_alive := EXISTS (SELECT FROM worker w WHERE w.id = p_worker_id AND w.status IN ('live', 'draining'));
  -- Whoever this worker knew must speak too, or its lease must end, before old jobs are claimed.
  -- Every speaker stands there too, also one whose registration was lost: it is waited for until its last statement, and whoever
  -- has spoken is alive. By id: two may name each other.
  INSERT INTO expected (worker, lease_ttl)
    SELECT r, coalesce((SELECT max(w.lease_ttl) FROM worker w), interval '60 s') FROM unnest(roster) r, cluster c
      WHERE c.gate <> 'open' AND NOT EXISTS (SELECT FROM worker w WHERE w.id = r)
    UNION SELECT w.id, w.lease_ttl FROM worker w WHERE w.id = p_worker_id
    ORDER BY 1 ON CONFLICT DO NOTHING;
  -- A window that closes by time meanwhile passes by who is speaking.
  UPDATE expected SET heard_at = clock_timestamp() WHERE worker = p_worker_id;

  -- Of several about one job the first is carried out before the next is looked at: it is about a later run.
  FOR v_round IN 1 .. coalesce((SELECT max(c.n) FROM (SELECT count(*) AS n FROM jsonb_array_elements(statements) e GROUP BY e ->> 'job') c), 0) LOOP
    v_ends := NULL;
    FOR v_item IN
      SELECT x.e FROM (
        SELECT e, e ->> 'job' AS job, row_number() OVER (PARTITION BY e ->> 'job' ORDER BY (e ->> 'run')::int) AS n
        FROM jsonb_array_elements(statements) e) x
      WHERE x.n = v_round ORDER BY x.job
    LOOP
      s := jsonb_populate_record(NULL::run_statement, v_item);
      -- A claim of the present epoch stands here. Its number in the statement proves nothing: numbers of lost epochs come again.
      v_lost := s.rerun AND s.kind IN ('hold', 'completed')
        AND NOT EXISTS (SELECT FROM lease l WHERE l.id = s.job AND l.token = s.token AND l.epoch_no >= v_epoch_no)
        AND NOT EXISTS (SELECT FROM effect f WHERE f.token = s.token);
      v_kind := restore_lease(p_worker_id, v_epoch_no, s);
      IF v_lost AND s.kind = 'hold' AND v_kind NOT IN ('busy', 'refused') THEN
        v_refused := refuse_effects(s.job, s.token);
        v_lost := v_refused = 'refused';
        v_kind := CASE WHEN v_refused = 'busy' THEN v_refused ELSE v_kind END;
      END IF;
      IF v_kind IN ('claimed_again', 'put_back') THEN
        PERFORM note_switch(v_epoch_no, p_worker_id, s.job, s.run, v_kind);
      END IF;
      IF v_kind = 'busy' THEN
        v_unsaid := true;
        RETURN QUERY SELECT s.job, s.run, s.token, 'busy', NULL::text;
      ELSIF s.kind = 'hold' THEN
        v_answer := CASE WHEN v_kind = 'refused' OR NOT v_alive THEN 'stop' WHEN v_lost THEN 'rerun' ELSE 'kept' END;
        IF v_answer = 'rerun' OR v_answer = 'stop' AND NOT has_ended(s.job, s.run, s.token) THEN
          PERFORM note_switch(v_epoch_no, p_worker_id, s.job, s.run, CASE v_answer WHEN 'rerun' THEN 'rerun' ELSE 'stopped' END);
        END IF;
        RETURN QUERY SELECT s.job, s.run, s.token, v_answer, NULL::text;
      ELSE
        v_end := jsonb_populate_record(NULL::run_end, v_item);
        IF v_lost AND v_kind <> 'refused' THEN
          v_end := ROW('released', s.job, s.run, s.token, NULL, false, NULL, NULL, NULL, NULL, NULL, NULL)::run_end;
          v_rerun := v_rerun || s.token;
        ELSIF s.confirmed THEN
          v_confirmed := v_confirmed || s.token;
        END IF;
        v_ends := array_append(v_ends, v_end);
      END IF;
    END LOOP;
    IF v_ends IS NOT NULL THEN
      v_answers := end_runs(p_worker_id, v_epoch_no, v_ends, true);
      v_all := v_all || v_answers;
      FOR v_done IN SELECT a.* FROM unnest(v_answers) a LOOP
        IF v_done.fresh AND v_done.token = ANY (v_confirmed || v_rerun) THEN
          PERFORM note_switch(v_epoch_no, p_worker_id, v_done.job, v_done.run, CASE WHEN v_done.token = ANY (v_rerun) THEN 'rerun' ELSE 'written_again' END);
        END IF;
        v_unsaid := v_unsaid OR v_done.answer = 'busy';
        RETURN QUERY SELECT v_done.job, v_done.run, v_done.token, v_done.answer, v_done.status;
      END LOOP;
    END IF;
  END LOOP;
  PERFORM move_watermarks(statements, v_all);
  IF v_unsaid THEN
    PERFORM report_speaker(v_epoch_no, v_uncovered.since, v_uncovered.until, v_without_primary);
    RETURN;
  END IF;
  -- The beat is the proof that all before it is here, and jobs from before are claimed when all have spoken: both only now.
  UPDATE beat SET beat = greatest(beat, p_beat) WHERE worker = p_worker_id;
  UPDATE expected SET spoken_at = clock_timestamp(), absent = false WHERE worker = p_worker_id;
  -- What the database shows under this worker and it does not name was claimed by a call whose answer it never read.
  SELECT array_agg(run_end_of(l, 'ghost')) INTO v_ghosts FROM (
    SELECT l.* FROM lease l WHERE l.worker = p_worker_id AND l.until IS NULL AND l.epoch_no < v_epoch_no AND NOT l.token = ANY (v_held)
      AND NOT EXISTS (SELECT FROM jsonb_populate_recordset(NULL::run_statement, statements) x WHERE x.job = l.id AND x.token = l.token)
    ORDER BY l.id FOR UPDATE SKIP LOCKED) l;
  IF v_ghosts IS NOT NULL THEN
    PERFORM end_runs(p_worker_id, v_epoch_no, v_ghosts);
  END IF;
  IF options ? 'predecessors' THEN
    PERFORM declare_lost(v_predecessors, v_epoch_no);
  END IF;
  IF close_window(false) THEN
    PERFORM promote_due(5000);
  END IF;
  PERFORM report_speaker(v_epoch_no, v_uncovered.since, v_uncovered.until, v_without_primary);
END $$ SET search_path FROM CURRENT;

SELECT grant_roles();
