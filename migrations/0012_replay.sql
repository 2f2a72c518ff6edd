-- breaking: no
-- Re-attaching with the memory of what had ended, and with what has to run again because its effects were lost.

ALTER TYPE run_statement ADD ATTRIBUTE confirmed boolean, ADD ATTRIBUTE rerun boolean;

-- Whether the database shows the end of this run.
CREATE FUNCTION has_ended(p_job uuid, p_run int, p_token uuid) RETURNS boolean LANGUAGE sql STABLE AS $$
  SELECT EXISTS (SELECT FROM outcome o WHERE o.id = p_job AND (o.run > p_run OR o.run = p_run AND o.token = p_token))
    OR EXISTS (SELECT FROM attempt a WHERE a.job_id = p_job AND a.run = p_run AND a.token = p_token AND a.applied)
$$;

-- The effects of a run were lost, and its handler is to be stopped: from now on assert_lease refuses it (bit 64 of lease.flags).
-- False: its transaction is open on this server, or has committed here meanwhile, so nothing was lost.
CREATE FUNCTION refuse_effects(p_job uuid, p_token uuid) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM lease l WHERE l.id = p_job AND l.token = p_token FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR EXISTS (SELECT FROM effect f WHERE f.token = p_token) THEN RETURN false; END IF;
  UPDATE lease SET flags = flags | 64 WHERE id = p_job;
  RETURN true;
END $$;

-- A worker whose last heartbeat here is older than its memory: what ended in between nobody can write again. A person decides.
-- From when to when that was; NULL: all is covered.
CREATE FUNCTION uncovered_span(p_covers jsonb, OUT since timestamptz, OUT until timestamptz) LANGUAGE sql STABLE AS $$
  SELECT min(b.beat_at), max(clock_timestamp() - coalesce(x.ms, 0) * interval '1 ms')
  FROM jsonb_to_recordset(p_covers) x(worker uuid, formerly uuid[], "from" bigint, ms bigint, predecessor boolean)
  -- One process counts its beats on when it becomes another worker.
  CROSS JOIN LATERAL (SELECT max(b.beat) AS beat, max(b.beat_at) AS beat_at FROM beat b WHERE b.worker = x.worker OR b.worker = ANY (x.formerly)) b
  -- The row of a worker that ended long ago is gone by right.
  WHERE b.beat < x."from" OR b.beat IS NULL AND x."from" > 0 AND x.predecessor IS NOT TRUE
$$;

-- The row of the switch is locked last by all, after the cluster row.
CREATE FUNCTION report_speaker(p_epoch_no bigint, p_since timestamptz, p_until timestamptz, p_without_primary interval) RETURNS void LANGUAGE sql AS $$
  UPDATE switch s SET uncovered_from = least(s.uncovered_from, p_since), uncovered_until = greatest(s.uncovered_until, p_until),
      without_primary = greatest(s.without_primary, p_without_primary)
    WHERE s.epoch_no = p_epoch_no AND (p_until IS NOT NULL OR p_without_primary > coalesce(s.without_primary, interval '-1 s'))
$$;

-- Makes the lease that a statement speaks of stand in the database, if the statement wins:
--   the job is missing: it is put back, and the statement wins
--   its run is equal and the lease has its token: it stands already
--   its run is higher, and what the database has was not claimed or ended in the present epoch: it wins
-- Answers: ours (it stood) | claimed_again | put_back | busy (locked by a user's transaction: say it again) | refused.
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
        v_flags & 5 | CASE WHEN s.rerun THEN 32 ELSE 0 END);
    RETURN v_how;
  END LOOP;
  RETURN 'busy';
END $$;
COMMENT ON FUNCTION restore_lease(uuid, bigint, run_statement) IS 'The merge rule: what a worker says against what the database shows.';

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
  v_done end_answer;
  v_answer text;
  v_lost boolean;
  v_ghosts run_end[];
  -- More statements follow in another call: the worker has not spoken before the last one.
  v_more boolean := coalesce((options ->> 'more')::boolean, false);
  v_held uuid[] := ARRAY(SELECT jsonb_array_elements_text(options -> 'held')::uuid);
  v_without_primary interval := (options ->> 'without_primary_ms')::bigint * interval '1 ms';
  v_uncovered record;
  v_confirmed uuid[] := '{}';  -- their ends had been answered before
  v_rerun uuid[] := '{}';      -- their effects were lost
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
  SELECT * INTO v_uncovered FROM uncovered_span(options -> 'covers');
  IF v_uncovered.until IS NOT NULL THEN
    UPDATE cluster SET uncovered = true, gate = 'hold' WHERE NOT uncovered;
  END IF;
  -- The beat is the proof that all before it is here, so it counts only with the last statement.
  UPDATE beat SET beat = CASE WHEN v_more THEN beat ELSE greatest(beat, p_beat) END, beat_at = clock_timestamp() WHERE worker = p_worker_id;
  -- Its registration may be part of what was lost.
  INSERT INTO beat (worker, beat, beat_at, settled, in_flight, told, stats)
    SELECT p_worker_id, CASE WHEN v_more THEN 0 ELSE p_beat END, clock_timestamp(), 0, 0, false, '{}'
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
  UPDATE expected SET spoken_at = clock_timestamp(), absent = false WHERE worker = p_worker_id AND NOT v_more;

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
        v_lost := refuse_effects(s.job, s.token);
      END IF;
      IF v_kind IN ('claimed_again', 'put_back') THEN
        PERFORM note_switch(v_epoch_no, p_worker_id, s.job, s.run, v_kind);
      END IF;
      IF v_kind = 'busy' THEN
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
      FOR v_done IN SELECT a.* FROM unnest(end_runs(p_worker_id, v_epoch_no, v_ends, true)) a LOOP
        IF v_done.fresh AND v_done.token = ANY (v_confirmed || v_rerun) THEN
          PERFORM note_switch(v_epoch_no, p_worker_id, v_done.job, v_done.run, CASE WHEN v_done.token = ANY (v_rerun) THEN 'rerun' ELSE 'written_again' END);
        END IF;
        RETURN QUERY SELECT v_done.job, v_done.run, v_done.token, v_done.answer, v_done.status;
      END LOOP;
    END IF;
  END LOOP;
  IF v_more THEN
    PERFORM report_speaker(v_epoch_no, v_uncovered.since, v_uncovered.until, v_without_primary);
    RETURN;
  END IF;
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
COMMENT ON FUNCTION reattach(uuid, uuid, bigint, jsonb, uuid[], jsonb) IS
  'Says all that this worker holds (kind hold) and has finished (as in finish), at any time, as often as wanted. A statement has kind, job, run, token, call, attempt, max_attempts, epoch_no, started_at, until_ms, the keys of finish, and row: the whole job. confirmed: the end had been answered before. rerun: its effects are in this database (see assert_lease). Answers: kept | stop (kill its handler) | rerun (kill it and release the job: its effects were lost) | busy | done | history. p_beat: the last heartbeat that was answered. roster: the live workers that it knew. options: name, version, lease_ttl_ms, heartbeat_ms, job_types, concurrency (its registration, which may have been lost); predecessors: workers known to be dead, whose jobs are then free at once; more: further statements follow in another call, and no heartbeat before the last of them; held: the tokens of the statements of all these calls, since what it does not name goes back with the last; covers: objects of worker, from (all ends are remembered that were answered after this heartbeat was sent) ms (how long ago that was), and formerly (ids under which the same process counted its heartbeats before); without_primary_ms: for how long it found no primary.';

-- Who may do what, with what has come since.
CREATE OR REPLACE FUNCTION grant_roles() RETURNS text[] LANGUAGE plpgsql AS $$
DECLARE
  v_schema text := (SELECT n.nspname FROM pg_class c JOIN pg_namespace n ON n.oid = c.relnamespace WHERE c.oid = 'job'::regclass);
  v_missing text[];
  v_role text;
  v_functions text;
BEGIN
  EXECUTE format('REVOKE ALL ON ALL FUNCTIONS IN SCHEMA %I FROM PUBLIC', v_schema);
  SELECT array_agg(r ORDER BY r) INTO v_missing FROM unnest('{tenure_producer,tenure_worker,tenure_monitor,tenure_admin}'::text[]) r
    WHERE NOT EXISTS (SELECT FROM pg_roles p WHERE p.rolname = r);
  FOR v_role IN SELECT p.rolname FROM pg_roles p WHERE p.rolname IN ('tenure_producer', 'tenure_worker', 'tenure_monitor', 'tenure_admin') ORDER BY 1 LOOP
    EXECUTE format('GRANT USAGE ON SCHEMA %I TO %I', v_schema, v_role);
    EXECUTE format('GRANT SELECT ON queue_metrics, workers, switches, cluster_status TO %I', v_role);
    -- Functions of a view run with the rights of whoever reads it.
    EXECUTE format('GRANT EXECUTE ON FUNCTION obstacle(int), last_error_of(uuid), tenants_of(name), hold_reason(cluster) TO %I', v_role);
    CONTINUE WHEN v_role = 'tenure_monitor';
    -- UPDATE and DELETE too, since what refuses them says which function to use.
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON jobs TO %I', v_role);
    SELECT string_agg(p.oid::regprocedure::text, ', ') INTO v_functions FROM pg_proc p
      WHERE p.pronamespace = quote_ident(v_schema)::regnamespace AND (
        p.proname IN ('enqueue', 'enqueue_many', 'uuid_v7', 'random_uuid', 'all_deps_completed', 'assert_lease')
        OR v_role IN ('tenure_worker', 'tenure_admin') AND p.proname IN ('open_epoch', 'register_worker', 'heartbeat', 'claim_job_batch', 'settle_marks', 'lanes',
          'set_sleeping', 'probe', 'finish', 'complete', 'fail', 'release', 'snooze', 'hold', 'reattach', 'sweep', 'promote', 'deregister_worker', 'worker_channel')
        OR v_role = 'tenure_admin' AND p.proname IN ('cancel', 'retry', 'review_dead_letter', 'complete_manually', 'move_to_dead_letter', 'pause', 'resume', 'drain_worker', 'accept_cluster', 'resume_cluster', 'retry_switch'));
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_functions, v_role);
    CONTINUE WHEN v_role = 'tenure_producer';
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO %I', v_schema, v_role);
    IF v_role = 'tenure_admin' THEN
      EXECUTE format('GRANT INSERT, DELETE ON tenant_grant TO %I', v_role);
    END IF;
  END LOOP;
  RETURN v_missing;
END $$ SET search_path FROM CURRENT;

SELECT grant_roles();
