-- breaking: yes
-- After a switch, a crash or a restart each worker says what it holds and what it finished. Here is what wins.

-- kind: hold, or a kind of run_end. row: the whole job, for when it has to be put back.
CREATE TYPE run_statement AS (
  kind text, job uuid, run int, token uuid, call bigint, attempt int, max_attempts int, epoch_no bigint, started_at timestamptz,
  until_ms bigint, "row" jsonb
);

CREATE TYPE waiting AS (place text, lane int, priority int, run int, attempts int, flags smallint);

-- Takes a job out of ready, later or blocked, wherever it stands, unless its run is p_below or more. NULL: it stands nowhere there,
-- or it moved while we looked.
CREATE FUNCTION take_waiting(p_id uuid, p_below int DEFAULT 2147483647) RETURNS waiting LANGUAGE plpgsql AS $$
DECLARE
  w waiting;
BEGIN
  DELETE FROM ready r USING (
      SELECT q.lane, q.priority, q.pos FROM requeued q WHERE q.id = p_id
      UNION SELECT j.lane, j.priority, j.pos FROM job j WHERE j.id = p_id AND j.pos IS NOT NULL) k
    -- Positions repeat after a switch: it counts only with the id.
    WHERE r.lane = k.lane AND r.priority = k.priority AND r.pos = k.pos AND r.id = p_id AND r.run < p_below
    RETURNING 'ready', r.lane, r.priority, r.run, r.attempts, r.flags INTO w;
  IF w.place IS NOT NULL THEN
    IF w.flags & 2 <> 0 THEN DELETE FROM requeued WHERE id = p_id; END IF;
    RETURN w;
  END IF;
  DELETE FROM later l WHERE l.id = p_id AND l.run < p_below RETURNING 'later', l.lane, l.priority, l.run, l.attempts, l.flags INTO w;
  IF w.place IS NOT NULL THEN RETURN w; END IF;
  DELETE FROM blocked b WHERE b.id = p_id AND b.run < p_below RETURNING 'blocked', b.lane, b.priority, b.run, b.attempts, b.flags INTO w;
  RETURN w;
END $$;

-- The job's own unique key for a job that lives again. A newer owner that has not begun gives way: it becomes cancelled.
-- False: a job that runs or ran meanwhile has it.
CREATE FUNCTION retake_key(p_id uuid) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  j job;
  v_owner uuid;
BEGIN
  SELECT * INTO j FROM job WHERE id = p_id;
  LOOP
    INSERT INTO key_owner (job_type, tenant, key, id) VALUES (j.job_type, j.tenant, j.unique_key, p_id) ON CONFLICT DO NOTHING;
    IF FOUND THEN RETURN true; END IF;
    SELECT k.id INTO v_owner FROM key_owner k WHERE k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key;
    CONTINUE WHEN NOT FOUND;
    IF v_owner = p_id THEN RETURN true; END IF;
    IF NOT end_waiting(v_owner, 'cancel', 'tenure', 'superseded by ' || p_id || ', which had this unique key before the switch') THEN
      RETURN false;
    END IF;
  END LOOP;
END $$;

-- Copies an outcome to attempt and deletes it: the job is open again.
CREATE FUNCTION reopen(o outcome, p_action text, p_reviewer text, p_note text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  DELETE FROM outcome WHERE id = o.id;
  DELETE FROM stop_request WHERE id = o.id;  -- it was about the life that has ended
  INSERT INTO attempt (job_id, run, token, attempt, worker, started_at, finished_at, outcome, applied, exit_code, http_status, result, error, log_tail)
    SELECT o.id, o.run, o.token, o.attempts, o.worker, o.started_at, o.finished_at, o.status, true, o.exit_code, o.http_status, o.result, o.error, o.log_tail
    WHERE o.token IS NOT NULL
    ON CONFLICT DO NOTHING;
  UPDATE dead_letter SET reviewed_by = p_reviewer, reviewed_at = clock_timestamp(), review_action = p_action, review_note = p_note
    WHERE job_id = o.id AND reviewed_at IS NULL;
END $$;

-- Makes the lease that a statement speaks of stand in the database, if the statement wins:
--   the job is missing: it is put back, and the statement wins
--   its run is equal and the lease has its token: it stands already
--   its run is higher, and what the database has was not claimed or ended in the present epoch: it wins
-- Answers: ours | busy (locked by a user's transaction: say it again) | refused.
CREATE FUNCTION restore_lease(p_worker uuid, p_epoch_no bigint, s run_statement) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  l lease;
  o outcome;
  w waiting;
  v_job job;
  v_flags smallint;
BEGIN
  FOR v_try IN 1 .. 100 LOOP
    v_flags := NULL;
    SELECT * INTO l FROM lease WHERE id = s.job;
    IF FOUND THEN
      IF l.token = s.token AND l.run = s.run THEN
        -- A successor takes over what its dead predecessor had ended: its own death must not end the lease.
        IF l.worker <> p_worker THEN
          UPDATE lease SET worker = p_worker, call = s.call WHERE id = s.job;
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
      VALUES (s.job, s.token, p_worker, coalesce(s.call, 0), least(coalesce(s.epoch_no, p_epoch_no - 1), p_epoch_no), s.run, s.attempt,
        coalesce(s.max_attempts, v_job.max_attempts, 5), v_job.lane, v_job.priority,
        clock_timestamp() + s.until_ms * interval '1 ms', coalesce(s.started_at, clock_timestamp()), v_flags & 5);
    RETURN 'ours';
  END LOOP;
  RETURN 'busy';
END $$;
COMMENT ON FUNCTION restore_lease(uuid, bigint, run_statement) IS 'The merge rule: what a worker says against what the database shows.';

-- Puts back a job whose enqueue was lost. It has no position of its own: the sequence may have given that to another by now.
CREATE FUNCTION put_back(p_id uuid, p_row jsonb) RETURNS smallint LANGUAGE plpgsql AS $$
DECLARE
  j job;
BEGIN
  j := jsonb_populate_record(NULL::job, p_row);
  INSERT INTO job (id, created_at, lane, priority, pos, run_at, max_attempts, timeout, job_type, tenant, unique_key, data, labels, options)
    VALUES (p_id, coalesce(j.created_at, now()), lane_of(j.job_type), coalesce(j.priority, 0), NULL, coalesce(j.run_at, now()), j.max_attempts, j.timeout,
      j.job_type, coalesce(j.tenant, 'default'), j.unique_key, coalesce(j.data, '{}'), coalesce(j.labels, '{}'), coalesce(j.options, '{}'))
    ON CONFLICT (id) DO NOTHING;
  IF NOT FOUND THEN RETURN NULL; END IF;
  RETURN CASE WHEN j.unique_key IS NOT NULL AND retake_key(p_id) THEN 1 ELSE 0 END;
END $$;

CREATE FUNCTION reattach(p_worker_id uuid, p_epoch uuid, p_beat bigint, statements jsonb, roster uuid[] DEFAULT '{}', options jsonb DEFAULT '{}')
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
  v_ghosts run_end[];
BEGIN
  PERFORM assert_objects(statements, 'statements');
  SELECT min(coalesce(x.kind, 'NULL')) INTO v_bad FROM jsonb_populate_recordset(NULL::run_statement, statements) x
    WHERE x.kind IS NULL OR x.kind NOT IN ('hold', 'completed', 'failed', 'released', 'snoozed') OR x.job IS NULL OR x.run IS NULL OR x.token IS NULL OR x.attempt IS NULL
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
  UPDATE beat SET beat = greatest(beat, p_beat), beat_at = clock_timestamp() WHERE worker = p_worker_id;
  -- Its registration may be part of what was lost.
  INSERT INTO beat (worker, beat, beat_at, settled, in_flight, told, stats) SELECT p_worker_id, p_beat, clock_timestamp(), 0, 0, false, '{}'
    WHERE options ? 'name' ON CONFLICT (worker) DO NOTHING;
  INSERT INTO worker (id, name, version, status, lease_ttl, heartbeat, job_types, concurrency, admitted, started_at)
    SELECT p_worker_id, options ->> 'name', coalesce(options ->> 'version', ''), 'live', (options ->> 'lease_ttl_ms')::bigint * interval '1 ms',
      (options ->> 'heartbeat_ms')::bigint * interval '1 ms', ARRAY(SELECT jsonb_array_elements_text(options -> 'job_types')),
      coalesce((options ->> 'concurrency')::int, 1), false, clock_timestamp()
    WHERE options ? 'name' ON CONFLICT (id) DO NOTHING;
  v_alive := EXISTS (SELECT FROM worker w WHERE w.id = p_worker_id AND w.status IN ('live', 'draining'));
  -- Whoever this worker knew must speak too, or its lease must end, before old jobs are claimed.
  INSERT INTO expected (worker, lease_ttl)
    SELECT r, coalesce((SELECT max(w.lease_ttl) FROM worker w), interval '60 s') FROM unnest(roster) r, cluster c
    WHERE c.gate = 'window' AND NOT EXISTS (SELECT FROM worker w WHERE w.id = r) ON CONFLICT DO NOTHING;
  UPDATE expected SET spoken_at = clock_timestamp() WHERE worker = p_worker_id;

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
      v_kind := restore_lease(p_worker_id, v_epoch_no, s);
      IF v_kind = 'busy' THEN
        RETURN QUERY SELECT s.job, s.run, s.token, 'busy', NULL::text;
      ELSIF s.kind = 'hold' THEN
        RETURN QUERY SELECT s.job, s.run, s.token, CASE WHEN v_kind = 'ours' AND v_alive THEN 'kept' ELSE 'stop' END, NULL::text;
      ELSE
        v_ends := array_append(v_ends, jsonb_populate_record(NULL::run_end, v_item));
      END IF;
    END LOOP;
    IF v_ends IS NOT NULL THEN
      RETURN QUERY SELECT a.job, a.run, a.token, a.answer, a.status FROM unnest(end_runs(p_worker_id, v_epoch_no, v_ends, true)) a;
    END IF;
  END LOOP;
  -- What the database shows under this worker and it does not name was claimed by a call whose answer it never read.
  SELECT array_agg(run_end_of(l, 'ghost')) INTO v_ghosts FROM (
    SELECT l.* FROM lease l WHERE l.worker = p_worker_id AND l.until IS NULL AND l.epoch_no < v_epoch_no
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
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION reattach(uuid, uuid, bigint, jsonb, uuid[], jsonb) IS
  'Says all that this worker holds (kind hold) and has finished (as in finish), at any time, as often as wanted. A statement has kind, job, run, token, call, attempt, max_attempts, epoch_no, started_at, until_ms, the keys of finish, and row: the whole job. Answers: kept | stop (kill its handler) | busy | done | history. roster: the live workers that it knew. options: name, version, lease_ttl_ms, heartbeat_ms, job_types, concurrency (its registration, which may have been lost); predecessors: workers known to be dead, whose jobs are then free at once.';
