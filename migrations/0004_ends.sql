-- breaking: yes
-- How runs end. Every end passes through end_runs, whoever says it: the worker, its heartbeat (ghosts), the sweep (lost workers,
-- expired leases), a drain, a replay after a switch.

CREATE TYPE end_answer AS (job uuid, run int, token uuid, answer text, status text, fresh boolean);

CREATE FUNCTION run_end_of(l lease, p_kind text, p_error text DEFAULT NULL) RETURNS run_end LANGUAGE sql IMMUTABLE AS $$
  SELECT ROW(p_kind, l.id, l.run, l.token, NULL, false, NULL, NULL, NULL, p_error, NULL, NULL)::run_end
$$;

-- Each statement below sees what was committed when it began (READ COMMITTED, VOLATILE): leases are locked first, and read again
-- in a later statement. Nothing waits for a user's transaction: what is locked is answered 'busy' and said again by the worker.
-- All consequences of an end hang on the insert of its outcome row, so a repeated statement has none.
CREATE FUNCTION end_any_runs(p_worker uuid, p_epoch_no bigint, p_ends run_end[], p_replay boolean) RETURNS end_answer[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_locked uuid[];
  v_open boolean := (SELECT c.gate = 'open' FROM cluster c);
  v_answers end_answer[];
  v_follow_ups new_job[];
BEGIN
  SELECT array_agg(x.id) INTO v_locked FROM (
    SELECT l.id FROM lease l WHERE l.id IN (SELECT e.job FROM unnest(p_ends) e) ORDER BY l.id FOR UPDATE SKIP LOCKED) x;
  WITH said AS MATERIALIZED (
    SELECT DISTINCT ON (e.job, e.run, e.token) e.* FROM unnest(p_ends) e ORDER BY e.job, e.run, e.token
  ), member AS MATERIALIZED (
    SELECT e.*, l.worker, l.epoch_no, l.attempts, l.max_attempts, l.lane, l.priority, l.started_at, l.flags & 5 AS flags
    FROM said e JOIN unnest(v_locked) k(id) ON k.id = e.job JOIN lease l ON l.id = e.job AND l.token = e.token AND l.run = e.run
  ), stop AS (
    DELETE FROM stop_request s USING member m WHERE s.id = m.job RETURNING s.*
  ), fate AS MATERIALIZED (
    SELECT m.*, s.kind AS stop, s.requested_by, s.reason,
      CASE
        WHEN s.kind IS NOT NULL THEN CASE s.kind WHEN 'cancel' THEN 'cancelled' WHEN 'complete' THEN 'completed' ELSE 'failed' END
        WHEN m.kind = 'completed' THEN 'completed'
        WHEN m.kind IN ('failed', 'lost') AND (m.final OR m.attempts >= m.max_attempts) THEN 'failed'
        WHEN m.kind = 'failed' OR m.kind = 'snoozed' OR m.delay_ms > 0 OR NOT v_open THEN 'later'
        ELSE 'ready'
      END AS fate,
      -- A run that was given back uses no attempt.
      CASE WHEN m.kind IN ('released', 'ghost', 'snoozed') THEN m.attempts - 1 ELSE m.attempts END AS left_attempts
    FROM member m LEFT JOIN stop s ON s.id = m.job
  ), gone AS (
    DELETE FROM lease l USING member m WHERE l.id = m.job
  ), done AS (
    INSERT INTO outcome (id, status, run, attempts, token, worker, epoch_no, lane, flags, started_at, finished_at,
      exit_code, http_status, result, error, log_tail)
    SELECT f.job, f.fate, CASE WHEN f.stop IS NULL THEN f.run ELSE f.run + 1 END, f.left_attempts, CASE WHEN f.stop IS NULL THEN f.token END,
      f.worker, CASE WHEN p_replay THEN f.epoch_no ELSE p_epoch_no END, f.lane, f.flags, f.started_at, clock_timestamp(),
      f.exit_code, f.http_status, CASE WHEN f.kind = 'completed' THEN f.result END,
      CASE WHEN f.stop IS NULL THEN f.error ELSE said_by(f.stop, f.requested_by, f.reason) END, f.log_tail
    FROM fate f WHERE f.fate NOT IN ('ready', 'later') ORDER BY f.job
    ON CONFLICT (id) DO NOTHING RETURNING id
  ), tried AS (
    INSERT INTO attempt (job_id, run, token, attempt, worker, started_at, finished_at, outcome, applied, exit_code, http_status, result, error, log_tail)
    SELECT f.job, f.run, f.token, f.attempts, f.worker, f.started_at, clock_timestamp(), f.kind, true, f.exit_code, f.http_status,
      CASE WHEN f.stop IS NOT NULL THEN f.result END, f.error, f.log_tail
    FROM fate f WHERE (f.stop IS NOT NULL OR f.fate IN ('ready', 'later')) AND f.kind <> 'ghost'
    ON CONFLICT DO NOTHING
  ), ended AS MATERIALIZED (
    -- As a subplan it is hashed; a join of two CTEs, of which the planner expects one row, would compare all with all.
    SELECT f.*, f.fate IN ('ready', 'later') OR f.job IN (SELECT d.id FROM done d) AS fresh FROM fate f
  ), died AS (
    INSERT INTO dead_letter (id, job_id, lane, run, attempts, last_error, failed_at)
    SELECT f.token, f.job, f.lane, CASE WHEN f.stop IS NULL THEN f.run ELSE f.run + 1 END, f.left_attempts,
      CASE WHEN f.stop IS NULL THEN f.error ELSE said_by(f.stop, f.requested_by, f.reason) END, clock_timestamp()
    FROM ended f WHERE f.fresh AND f.fate = 'failed' ON CONFLICT DO NOTHING
  ), unkeyed AS (
    DELETE FROM key_owner k USING ended f JOIN job j ON j.id = f.job
    WHERE f.flags & 1 <> 0 AND f.fresh AND f.fate NOT IN ('ready', 'later') AND k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key AND k.id = f.job
  ), put_off AS (
    INSERT INTO later (id, due, waits_for, lane, priority, run, attempts, flags)
    SELECT f.job, clock_timestamp() + coalesce(f.delay_ms, 0) * interval '1 ms',
      CASE f.kind WHEN 'failed' THEN 'retry' WHEN 'snoozed' THEN 'snooze' ELSE CASE WHEN v_open THEN 'time' ELSE 'window' END END,
      f.lane, f.priority, f.run, f.left_attempts, f.flags
    FROM fate f WHERE f.fate = 'later'
  ), queued AS (
    INSERT INTO ready (lane, priority, pos, id, run, attempts, flags, ready_at)
    SELECT f.lane, f.priority, nextval('ready_pos'), f.job, f.run, f.left_attempts,
      f.flags | 2 | CASE WHEN row_number() OVER (PARTITION BY f.lane) <= 4 THEN 8 ELSE 0 END, clock_timestamp()
    FROM fate f WHERE f.fate = 'ready' RETURNING id, lane, priority, pos
  ), found AS (
    INSERT INTO requeued (id, lane, priority, pos) SELECT q.id, q.lane, q.priority, q.pos FROM queued q
  ), late AS MATERIALIZED (
    -- Not a member: the lease is locked by another (busy), or it is another's or nobody's. What was said before is done.
    SELECT e.*, EXISTS (SELECT FROM lease l WHERE l.id = e.job) AND NOT EXISTS (SELECT FROM unnest(v_locked) k WHERE k = e.job) AS busy,
      EXISTS (SELECT FROM outcome o WHERE o.id = e.job AND o.run = e.run AND o.token = e.token AND o.status = e.kind)
        OR EXISTS (SELECT FROM attempt a WHERE a.job_id = e.job AND a.run = e.run AND a.token = e.token AND a.applied AND a.outcome = e.kind) AS known
    FROM said e WHERE (e.job, e.run, e.token) NOT IN (SELECT m.job, m.run, m.token FROM member m)
  ), history AS (
    INSERT INTO attempt (job_id, run, token, worker, finished_at, outcome, applied, exit_code, http_status, result, error, log_tail)
    SELECT e.job, e.run, e.token, p_worker, clock_timestamp(), e.kind, false, e.exit_code, e.http_status, e.result, e.error, e.log_tail
    FROM late e WHERE NOT e.busy AND NOT e.known AND EXISTS (SELECT FROM job j WHERE j.id = e.job)
    ON CONFLICT DO NOTHING
  )
  SELECT array_agg(a) INTO v_answers FROM (
    SELECT ROW(f.job, f.run, f.token, 'done', CASE f.fate WHEN 'ready' THEN 'pending' WHEN 'later' THEN 'scheduled' ELSE f.fate END,
      f.fresh)::end_answer AS a
    FROM ended f
    UNION ALL
    SELECT ROW(e.job, e.run, e.token, CASE WHEN e.busy THEN 'busy' WHEN e.known THEN 'done' ELSE 'history' END, NULL, false)::end_answer FROM late e
  ) x;
  IF EXISTS (SELECT FROM unnest(v_answers) a WHERE a.answer = 'done' AND a.status IS NOT NULL AND NOT a.fresh) THEN
    RAISE WARNING 'tenure: a job had a lease and an outcome at once; the outcome stands';
  END IF;
  IF EXISTS (SELECT FROM unnest(p_ends) e WHERE jsonb_typeof(e.enqueue) = 'array') THEN
    SELECT array_agg(j) INTO v_follow_ups
      FROM unnest(p_ends) e JOIN unnest(v_answers) a ON a.job = e.job AND a.token = e.token AND a.fresh AND a.status = 'completed' AND e.kind = 'completed',
        jsonb_populate_recordset(NULL::new_job, e.enqueue) j
      WHERE jsonb_typeof(e.enqueue) = 'array';
    IF v_follow_ups IS NOT NULL THEN
      PERFORM put_jobs(v_follow_ups);
    END IF;
  END IF;
  RETURN v_answers;
END $$;

-- The usual case has a short statement of its own, for a third less of the server's time: runs that completed without asking for
-- more, and of which nobody asked anything. What that leaves, and all else, takes the long way; both have the same effect.
CREATE FUNCTION end_runs(p_worker uuid, p_epoch_no bigint, p_ends run_end[], p_replay boolean DEFAULT false) RETURNS end_answer[] LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_locked uuid[];
  v_answers end_answer[];
  v_rest run_end[];
BEGIN
  IF p_replay OR EXISTS (SELECT FROM unnest(p_ends) e WHERE e.kind <> 'completed' OR e.enqueue IS NOT NULL) OR EXISTS (SELECT FROM stop_request) THEN
    RETURN end_any_runs(p_worker, p_epoch_no, p_ends, p_replay);
  END IF;
  SELECT array_agg(x.id) INTO v_locked FROM (
    SELECT l.id FROM lease l WHERE l.id IN (SELECT e.job FROM unnest(p_ends) e) ORDER BY l.id FOR UPDATE SKIP LOCKED) x;
  WITH gone AS (
    DELETE FROM lease l USING unnest(v_locked) k(id), unnest(p_ends) e
    WHERE l.id = k.id AND e.job = k.id AND l.token = e.token AND l.run = e.run
    RETURNING l.id, l.run, l.token, l.attempts, l.worker, l.lane, l.flags & 5 AS flags, l.started_at, e.exit_code, e.http_status, e.result, e.error, e.log_tail
  ), done AS (
    INSERT INTO outcome (id, status, run, attempts, token, worker, epoch_no, lane, flags, started_at, finished_at,
      exit_code, http_status, result, error, log_tail)
    SELECT g.id, 'completed', g.run, g.attempts, g.token, g.worker, p_epoch_no, g.lane, g.flags, g.started_at, clock_timestamp(),
      g.exit_code, g.http_status, g.result, g.error, g.log_tail
    FROM gone g ORDER BY g.id ON CONFLICT (id) DO NOTHING RETURNING id, run, token, flags
  ), unkeyed AS (
    DELETE FROM key_owner k USING done d JOIN job j ON j.id = d.id
    WHERE d.flags & 1 <> 0 AND k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key AND k.id = d.id
  )
  SELECT array_agg(ROW(d.id, d.run, d.token, 'done', 'completed', true)::end_answer) INTO v_answers FROM done d;
  IF cardinality(v_answers) = cardinality(p_ends) THEN
    RETURN v_answers;
  END IF;
  v_rest := ARRAY(SELECT e FROM unnest(p_ends) e WHERE e.token NOT IN (SELECT a.token FROM unnest(v_answers) a));
  RETURN coalesce(v_answers, '{}') || end_any_runs(p_worker, p_epoch_no, v_rest, false);
END $$;
COMMENT ON FUNCTION end_runs(uuid, bigint, run_end[], boolean) IS 'Carries out ends of runs: the one place where a lease ends.';

CREATE FUNCTION said_by(p_stop text, p_by text, p_reason text) RETURNS text LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE p_stop WHEN 'cancel' THEN 'cancelled by ' WHEN 'complete' THEN 'completed by hand by ' ELSE 'moved to the dead letters by ' END
    || p_by || coalesce(': ' || p_reason, '')
$$;

CREATE FUNCTION finish(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_ends run_end[];
  v_bad text;
  v_incomplete boolean;
BEGIN
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
  'Ends of runs of any kind in one call. Items: kind (completed | failed | released | snoozed), job, run, token, delay_ms (failed: until the next attempt; snoozed, released: until it is ready), final (failed: never again), exit_code, http_status, result, error, log_tail, enqueue (completed: follow-up jobs with ids). Answer for each: done; busy: the job is locked by another transaction, say it again; history: the run had lost its lease, nothing was changed.';

CREATE FUNCTION with_kind(p_items jsonb, p_kind text) RETURNS jsonb LANGUAGE sql IMMUTABLE AS $$
  SELECT CASE WHEN jsonb_typeof(p_items) = 'array' THEN
    (SELECT coalesce(jsonb_agg(e || jsonb_build_object('kind', p_kind)), '[]') FROM jsonb_array_elements(p_items) e) ELSE p_items END
$$;
CREATE FUNCTION complete(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE sql SECURITY DEFINER AS $$
  SELECT * FROM finish(p_worker_id, p_epoch, with_kind(p_items, 'completed'), options)
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION complete(uuid, uuid, jsonb, jsonb) IS 'These runs ended well. Items and answers as in finish, without kind.';
CREATE FUNCTION fail(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE sql SECURITY DEFINER AS $$
  SELECT * FROM finish(p_worker_id, p_epoch, with_kind(p_items, 'failed'), options)
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION fail(uuid, uuid, jsonb, jsonb) IS 'These runs failed: again after delay_ms, or a dead letter when final or when the attempts are used up. Items and answers as in finish, without kind.';
CREATE FUNCTION release(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE sql SECURITY DEFINER AS $$
  SELECT * FROM finish(p_worker_id, p_epoch, with_kind(p_items, 'released'), options)
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION release(uuid, uuid, jsonb, jsonb) IS 'These runs are given back unfinished; no attempt is used. Their handlers must be dead before. Items and answers as in finish, without kind.';
CREATE FUNCTION snooze(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, run int, token uuid, answer text, status text) LANGUAGE sql SECURITY DEFINER AS $$
  SELECT * FROM finish(p_worker_id, p_epoch, with_kind(p_items, 'snoozed'), options)
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION snooze(uuid, uuid, jsonb, jsonb) IS 'These runs want to be tried again after delay_ms; no attempt is used. Items and answers as in finish, without kind.';

CREATE FUNCTION hold(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, token uuid, answer text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
BEGIN
  PERFORM assert_epoch(p_epoch);
  PERFORM assert_objects(p_items, 'the items');
  IF EXISTS (SELECT FROM jsonb_to_recordset(p_items) i(job uuid, token uuid, for_ms bigint)
    WHERE i.job IS NULL OR i.token IS NULL OR i.for_ms IS NULL OR i.for_ms <= 0)
  THEN
    PERFORM refuse('TN007', 'an item lacks job, token or a for_ms above zero');
  END IF;
  -- By id, since several daemons may hold the same jobs.
  PERFORM FROM lease l WHERE l.id IN (SELECT i.job FROM jsonb_to_recordset(p_items) i(job uuid)) ORDER BY l.id FOR NO KEY UPDATE OF l;
  RETURN QUERY
    WITH held AS (
      UPDATE lease l SET until = clock_timestamp() + i.for_ms * interval '1 ms'
      FROM jsonb_to_recordset(p_items) i(job uuid, token uuid, for_ms bigint)
      WHERE l.id = i.job AND l.token = i.token RETURNING l.id, l.token
    )
    SELECT i.job, i.token, CASE WHEN h.id IS NULL THEN 'history' ELSE 'done' END
    FROM jsonb_to_recordset(p_items) i(job uuid, token uuid) LEFT JOIN held h ON h.id = i.job AND h.token = i.token;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION hold(uuid, uuid, jsonb, jsonb) IS
  'Gives leases a time of their own: items of job, token, for_ms. From then on they do not depend on any worker''s heartbeat; any worker may hold them again or end them.';

CREATE FUNCTION assert_lease(job_id uuid, token uuid, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  -- Whoever takes a lease away deletes this row or locks it FOR UPDATE, and so waits for, or passes by, the caller's transaction.
  PERFORM FROM lease l WHERE l.id = assert_lease.job_id AND l.token = assert_lease.token FOR KEY SHARE;
  IF NOT FOUND THEN
    PERFORM refuse('TN006', format('job %s is no longer leased under this token', job_id),
      'Roll back: the job was given to another run, cancelled, or has ended.');
  END IF;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION assert_lease(uuid, uuid, jsonb) IS
  'Raises unless the job is leased under this token, and keeps it so until the calling transaction ends. Call it in the transaction that writes a job''s effects: then those commit only if no other run took the job.';
