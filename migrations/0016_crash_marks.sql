-- breaking: no
-- A process that dies with several jobs in it leaves a mark on each (end kind crashed): such a job runs alone from then on, so that the next
-- death says whose it is.

-- One more bit of flags, in ready, later and lease:
--   128  a process died while it had this job and others

CREATE OR REPLACE FUNCTION end_any_runs(p_worker uuid, p_epoch_no bigint, p_ends run_end[], p_replay boolean) RETURNS end_answer[] LANGUAGE plpgsql AS $$
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
    SELECT e.*, l.worker, l.epoch_no, l.attempts, l.max_attempts, l.lane, l.priority, l.started_at, l.flags & 133 | CASE WHEN e.kind = 'crashed' THEN 128 ELSE 0 END AS flags
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
      CASE WHEN m.kind IN ('released', 'crashed', 'ghost', 'snoozed') THEN m.attempts - 1 ELSE m.attempts END AS left_attempts
    FROM member m LEFT JOIN stop s ON s.id = m.job
  ), gone AS (
    DELETE FROM lease l USING member m WHERE l.id = m.job
  ), done AS (
    INSERT INTO outcome (id, status, run, attempts, token, worker, epoch_no, lane, flags, started_at, finished_at,
      exit_code, http_status, result, error, log_tail)
    SELECT f.job, f.fate, CASE WHEN f.stop IS NULL THEN f.run ELSE f.run + 1 END, f.left_attempts, CASE WHEN f.stop IS NULL THEN f.token END,
      f.worker, CASE WHEN p_replay THEN f.epoch_no ELSE p_epoch_no END, f.lane, f.flags & 5, f.started_at, clock_timestamp(),
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

CREATE OR REPLACE FUNCTION restore_lease(p_worker uuid, p_epoch_no bigint, s run_statement) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  l lease;
  o outcome;
  w waiting;
  v_job job;
  v_flags smallint;
  v_how text := 'claimed_again';
BEGIN
  FOR v_try IN 1 .. 100 LOOP
    v_flags := NULL;
    SELECT * INTO l FROM lease WHERE id = s.job;
    IF FOUND THEN
      IF l.token = s.token AND l.run = s.run THEN
        -- A successor takes over what its dead predecessor had ended: its own death must not end the lease. The dead take nothing.
        IF l.worker <> p_worker AND EXISTS (SELECT FROM worker x WHERE x.id = p_worker AND x.status IN ('live', 'draining')) THEN
          UPDATE lease SET worker = p_worker, call = coalesce(s.call, call) WHERE id = s.job;
        END IF;
        RETURN 'ours';
      END IF;
      IF s.run <= l.run OR l.epoch_no >= p_epoch_no THEN RETURN 'refused'; END IF;
      PERFORM FROM lease WHERE id = s.job AND token = l.token FOR UPDATE SKIP LOCKED;
      IF NOT FOUND THEN RETURN 'busy'; END IF;
      DELETE FROM lease WHERE id = s.job;
      INSERT INTO revocation (worker, job_id, token, reason, revoked_at) VALUES (l.worker, s.job, l.token, 'taken over', clock_timestamp())
        ON CONFLICT DO NOTHING;
      INSERT INTO attempt (job_id, run, token, attempt, worker, started_at, finished_at, outcome, applied, error)
        VALUES (s.job, l.run, l.token, l.attempts, l.worker, l.started_at, clock_timestamp(), 'lost', true, 'a later run was found after a switch')
        ON CONFLICT DO NOTHING;
      v_flags := l.flags;
    ELSE
      SELECT * INTO o FROM outcome WHERE id = s.job FOR UPDATE SKIP LOCKED;
      IF NOT FOUND AND EXISTS (SELECT FROM outcome WHERE id = s.job) THEN
        RETURN 'busy';
      ELSIF o.id IS NOT NULL THEN
        IF s.run <= o.run OR o.epoch_no >= p_epoch_no THEN RETURN 'refused'; END IF;
        PERFORM reopen(o, 'retry', 'tenure', 'a later run was found after a switch');
        v_flags := o.flags;
        IF o.flags & 1 <> 0 AND NOT retake_key(s.job) THEN v_flags := o.flags & ~1; END IF;
      ELSE
        w := take_waiting(s.job, s.run);
        IF w.place IS NOT NULL THEN
          v_flags := w.flags;
        ELSE
          SELECT * INTO v_job FROM job WHERE id = s.job;
          IF NOT FOUND THEN
            IF s."row" IS NULL THEN RETURN 'refused'; END IF;
            v_flags := put_back(s.job, s."row");
            v_how := 'put_back';
          ELSIF EXISTS (SELECT FROM later x WHERE x.id = s.job AND x.run >= s.run)
            OR EXISTS (SELECT FROM blocked x WHERE x.id = s.job AND x.run >= s.run)
            OR EXISTS (SELECT FROM ready r JOIN requeued q USING (lane, priority, pos, id) WHERE r.id = s.job AND r.run >= s.run)
            OR EXISTS (SELECT FROM ready r WHERE r.lane = v_job.lane AND r.priority = v_job.priority AND r.pos = v_job.pos AND r.id = s.job AND r.run >= s.run)
          THEN
            RETURN 'refused';
          END IF;
        END IF;
      END IF;
    END IF;
    CONTINUE WHEN v_flags IS NULL;  -- it moved between two looks
    SELECT * INTO v_job FROM job WHERE id = s.job;
    INSERT INTO lease (id, token, worker, call, epoch_no, run, attempts, max_attempts, lane, priority, until, started_at, flags)
      VALUES (s.job, s.token, p_worker, coalesce(s.call, 0), least(s.epoch_no, p_epoch_no - 1), s.run, s.attempt,
        coalesce(s.max_attempts, v_job.max_attempts, 5), v_job.lane, v_job.priority,
        clock_timestamp() + s.until_ms * interval '1 ms', coalesce(s.started_at, clock_timestamp()),
        v_flags & 133 | CASE WHEN s.rerun THEN 32 ELSE 0 END);
    RETURN v_how;
  END LOOP;
  RETURN 'busy';
END $$;

-- Moves due jobs to ready. In a window nothing from before it may be claimed, so they wait.
CREATE OR REPLACE FUNCTION promote_due(p_limit int) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_moved int;
BEGIN
  IF (SELECT c.gate <> 'open' FROM cluster c) THEN RETURN 0; END IF;
  WITH due AS (
    DELETE FROM later WHERE id IN (SELECT l.id FROM later l WHERE l.due <= clock_timestamp() ORDER BY l.due LIMIT p_limit FOR UPDATE SKIP LOCKED)
    RETURNING *
  ), queued AS (
    INSERT INTO ready (lane, priority, pos, id, run, attempts, flags, ready_at)
    SELECT d.lane, d.priority, d.pos, d.id, d.run, d.attempts,
      d.flags & 133 | 2 | CASE WHEN row_number() OVER (PARTITION BY d.lane) <= 4 THEN 8 ELSE 0 END, greatest(d.due, now() - interval '1 day')
    FROM (SELECT o.*, nextval('ready_pos') AS pos FROM (SELECT * FROM due ORDER BY due) o) d RETURNING id, lane, priority, pos
  )
  INSERT INTO requeued (id, lane, priority, pos) SELECT q.id, q.lane, q.priority, q.pos FROM queued q;
  GET DIAGNOSTICS v_moved = ROW_COUNT;
  RETURN v_moved;
END $$;

SELECT grant_roles();
