-- breaking: yes
-- What people do with jobs.

-- While workers re-attach, the database may not show what became of a job.
CREATE FUNCTION assert_gate(p_id uuid) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  v_cluster cluster;
  v_pos bigint;
BEGIN
  IF current_setting('transaction_isolation') <> 'read committed' THEN
    PERFORM refuse('TN007', 'this function needs READ COMMITTED, the transaction is ' || upper(current_setting('transaction_isolation')));
  END IF;
  SELECT j.pos INTO v_pos FROM job j WHERE j.id = p_id;
  IF NOT FOUND THEN
    PERFORM refuse('TN005', format('no job %s', p_id));
  END IF;
  SELECT * INTO v_cluster FROM cluster;
  -- What is from before is seen by its position: the clock of this server may be behind that of the last one.
  IF NOT EXISTS (SELECT FROM here h WHERE h.epoch = v_cluster.epoch) OR v_cluster.gate = 'window' AND coalesce(v_pos, 0) <= v_cluster.mark THEN
    PERFORM refuse('TN002', 'workers are re-attaching after a switch or restart of the database', 'Try again in a moment.');
  ELSIF v_cluster.gate = 'hold' THEN
    PERFORM refuse('TN003', 'the gate is on hold after a switch', 'Nothing is claimed until it is opened.');
  END IF;
END $$;


-- Ends a job that does not run. False: it does not wait (any more).
CREATE FUNCTION end_waiting(p_id uuid, p_kind text, p_by text, p_reason text) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  w waiting := take_waiting(p_id);
  v_status text := CASE p_kind WHEN 'cancel' THEN 'cancelled' WHEN 'complete' THEN 'completed' ELSE 'failed' END;
BEGIN
  IF w.place IS NULL THEN RETURN false; END IF;
  INSERT INTO outcome (id, status, run, attempts, epoch_no, lane, flags, finished_at, error)
    SELECT p_id, v_status, w.run + 1, w.attempts, c.epoch_no, w.lane, w.flags & 5, clock_timestamp(), said_by(p_kind, p_by, p_reason) FROM cluster c;
  IF w.flags & 1 <> 0 THEN
    DELETE FROM key_owner k USING job j WHERE j.id = p_id AND k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key AND k.id = p_id;
  END IF;
  IF v_status = 'failed' THEN
    INSERT INTO dead_letter (id, job_id, lane, run, attempts, last_error, failed_at)
      VALUES (random_uuid(), p_id, w.lane, w.run + 1, w.attempts, said_by(p_kind, p_by, p_reason), clock_timestamp());
  END IF;
  RETURN true;
END $$;

-- A waiting job is ended at once; of a running one the end is asked for, and its worker told. Answers with the status that it has then.
CREATE FUNCTION ask_end(p_id uuid, p_kind text, p_by text, p_reason text) RETURNS text LANGUAGE plpgsql AS $$
DECLARE
  v_status text;
  v_worker uuid;
BEGIN
  PERFORM assert_gate(p_id);
  FOR v_try IN 1 .. 100 LOOP
    SELECT o.status INTO v_status FROM outcome o WHERE o.id = p_id;
    IF FOUND THEN RETURN v_status; END IF;
    SELECT l.worker INTO v_worker FROM lease l WHERE l.id = p_id;
    IF FOUND THEN
      INSERT INTO stop_request (id, kind, reason, requested_by, requested_at) VALUES (p_id, p_kind, p_reason, p_by, clock_timestamp())
        ON CONFLICT (id) DO NOTHING;
      PERFORM pg_notify(worker_channel(v_worker), 'beat');
      RETURN 'stopping';
    END IF;
    IF end_waiting(p_id, p_kind, p_by, p_reason) THEN
      RETURN CASE p_kind WHEN 'cancel' THEN 'cancelled' WHEN 'complete' THEN 'completed' ELSE 'failed' END;
    END IF;
  END LOOP;
  PERFORM refuse('TN002', format('job %s changes its state all the time', p_id), 'Try again in a moment.');
END $$;

CREATE FUNCTION cancel(job_id uuid, reason text DEFAULT NULL, options jsonb DEFAULT '{}') RETURNS text LANGUAGE sql SECURITY DEFINER AS $$
  SELECT ask_end(job_id, 'cancel', coalesce(options ->> 'by', session_user), reason)
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION cancel(uuid, text, jsonb) IS
  'Waiting: cancelled at once. Running: answers stopping; its handler is stopped and the job is then cancelled. Ended: answers with its status and changes nothing. options: by.';

CREATE FUNCTION move_to_dead_letter(p_job_id uuid, options jsonb DEFAULT '{}') RETURNS text LANGUAGE sql SECURITY DEFINER AS $$
  SELECT ask_end(p_job_id, 'dead', coalesce(options ->> 'by', session_user), options ->> 'reason')
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION move_to_dead_letter(uuid, jsonb) IS 'As cancel, but the job becomes a dead letter that waits for review. options: by, reason.';

-- Opens an ended job again: from its outcome to ready, as run + 1 with no attempt used.
CREATE FUNCTION run_again(o outcome, p_by text, p_note text, p_data jsonb) RETURNS void LANGUAGE plpgsql AS $$
DECLARE
  j job;
  v_owner uuid;
  v_pos bigint;
  v_flags int := o.flags & 4;
BEGIN
  SELECT * INTO j FROM job WHERE id = o.id;
  PERFORM reopen(o, 'retry', p_by, p_note);
  IF j.unique_key IS NOT NULL THEN
    INSERT INTO key_owner (job_type, tenant, key, id) VALUES (j.job_type, j.tenant, j.unique_key, j.id) ON CONFLICT DO NOTHING;
    IF NOT FOUND THEN
      SELECT k.id INTO v_owner FROM key_owner k WHERE k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key;
      PERFORM refuse('TN006', format('job %s cannot run again: its unique key %L belongs to job %s now', j.id, j.unique_key, v_owner),
        'Wait for that job, or cancel it.');
    END IF;
    v_flags := v_flags | 1;
  END IF;
  IF p_data IS NOT NULL THEN
    INSERT INTO edit (id, data, edited_by, edited_at) VALUES (o.id, p_data, p_by, clock_timestamp())
      ON CONFLICT (id) DO UPDATE SET data = excluded.data, edited_by = excluded.edited_by, edited_at = excluded.edited_at;
    v_flags := v_flags | 4;
  END IF;
  v_pos := nextval('ready_pos');
  INSERT INTO ready (lane, priority, pos, id, run, attempts, flags, ready_at)
    SELECT j.lane, j.priority, v_pos, o.id, o.run + 1, 0, v_flags | 2 | 8 | CASE WHEN c.gate = 'open' THEN 0 ELSE 16 END, clock_timestamp() FROM cluster c;
  INSERT INTO requeued (id, lane, priority, pos) VALUES (o.id, j.lane, j.priority, v_pos);
END $$;

CREATE FUNCTION retry(job_id uuid, options jsonb DEFAULT '{}') RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  o outcome;
BEGIN
  PERFORM assert_gate(job_id);
  SELECT * INTO o FROM outcome WHERE id = job_id FOR UPDATE;
  IF NOT FOUND OR o.status = 'completed' THEN
    PERFORM refuse('TN006', format('job %s is %s', job_id, coalesce(o.status, status_of(job_id), 'changing its state')),
      'Only failed, discarded and cancelled jobs can be retried.');
  END IF;
  PERFORM run_again(o, coalesce(options ->> 'by', session_user), 'retried', NULL);
  RETURN 'pending';
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION retry(uuid, jsonb) IS 'Runs a failed, discarded or cancelled job again, with no attempt used. Its open dead letter is closed as retried. Refused when another live job has its unique key. options: by.';

-- Ends an ended job in another way.
CREATE FUNCTION end_anew(o outcome, p_status text, p_action text, p_by text, p_note text) RETURNS void LANGUAGE plpgsql AS $$
BEGIN
  PERFORM reopen(o, p_action, p_by, p_note);
  INSERT INTO outcome (id, status, run, attempts, epoch_no, lane, flags, started_at, finished_at, error)
    SELECT o.id, p_status, o.run + 1, o.attempts, c.epoch_no, o.lane, o.flags, o.started_at, clock_timestamp(),
      CASE p_status WHEN 'completed' THEN 'completed by hand by ' ELSE 'discarded by ' END || p_by || coalesce(': ' || p_note, '') FROM cluster c;
END $$;

CREATE FUNCTION review_dead_letter(
  dead_letter_id uuid, action text, reviewer text, note text DEFAULT NULL, data jsonb DEFAULT NULL, options jsonb DEFAULT '{}'
) RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  d dead_letter;
  o outcome;
  v_fault text;
BEGIN
  IF action IS NULL OR action NOT IN ('retry', 'discard', 'fixed') THEN
    PERFORM refuse('TN007', format('action %L is none of retry, discard, fixed', action));
  ELSIF coalesce(btrim(reviewer), '') = '' THEN
    PERFORM refuse('TN007', 'reviewer is missing: say who decides');
  ELSIF data IS NOT NULL AND action <> 'retry' THEN
    PERFORM refuse('TN007', 'data can only be changed together with the action retry');
  END IF;
  SELECT * INTO d FROM dead_letter WHERE id = dead_letter_id;
  IF NOT FOUND THEN
    PERFORM refuse('TN005', format('no dead letter %s', dead_letter_id));
  END IF;
  PERFORM assert_gate(d.job_id);
  -- The outcome before the letter, as all do that reopen a job.
  SELECT * INTO o FROM outcome WHERE id = d.job_id FOR UPDATE;
  SELECT * INTO d FROM dead_letter WHERE id = dead_letter_id FOR UPDATE;
  IF d.reviewed_at IS NOT NULL THEN
    PERFORM refuse('TN006', format('dead letter %s was reviewed by %s at %s: %s', d.id, d.reviewed_by, d.reviewed_at, d.review_action));
  ELSIF o.id IS NULL OR o.status <> 'failed' THEN
    PERFORM refuse('TN006', format('job %s is %s', d.job_id, coalesce(o.status, status_of(d.job_id))));
  END IF;
  IF action = 'retry' THEN
    v_fault := fault_in(ARRAY[ROW('x', data, 0, NULL, 'x', NULL, NULL, NULL, NULL, '{}', '{}')::new_job]);
    IF v_fault IS NOT NULL THEN PERFORM refuse('TN007', v_fault); END IF;
    PERFORM run_again(o, reviewer, note, data);
    RETURN 'pending';
  END IF;
  PERFORM end_anew(o, CASE action WHEN 'fixed' THEN 'completed' ELSE 'discarded' END, action, reviewer, note);
  RETURN CASE action WHEN 'fixed' THEN 'completed' ELSE 'discarded' END;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION review_dead_letter(uuid, text, text, text, jsonb, jsonb) IS
  'Decides a dead letter. retry: the job runs again, with data in place of its own if given; discard: it will never run; fixed: a person has done it, it counts as completed. Each letter is decided once.';

CREATE FUNCTION complete_manually(job_id uuid, reviewer text, note text DEFAULT NULL, options jsonb DEFAULT '{}') RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_status text;
  o outcome;
BEGIN
  IF coalesce(btrim(reviewer), '') = '' THEN
    PERFORM refuse('TN007', 'reviewer is missing: say who decides');
  END IF;
  PERFORM assert_gate(job_id);
  SELECT * INTO o FROM outcome WHERE id = job_id FOR UPDATE;
  IF FOUND AND o.status <> 'completed' THEN
    PERFORM end_anew(o, 'completed', 'fixed', reviewer, note);
    RETURN 'completed';
  END IF;
  v_status := CASE WHEN o.id IS NULL THEN ask_end(job_id, 'complete', reviewer, note) ELSE 'completed already' END;
  IF v_status NOT IN ('completed', 'stopping') THEN
    PERFORM refuse('TN006', format('job %s is %s', job_id, v_status));
  END IF;
  RETURN v_status;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION complete_manually(uuid, text, text, jsonb) IS
  'A person has done the job: it counts as completed, whatever it waits for or died of. Running: answers stopping; its handler is stopped first. Refused when it completed by itself.';

CREATE FUNCTION pause(job_type text, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_lane int := lane_of(job_type);
BEGIN
  UPDATE lane SET paused_at = coalesce(paused_at, clock_timestamp()), paused_by = coalesce(paused_by, options ->> 'by', session_user)
    WHERE lane = v_lane;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION pause(text, jsonb) IS 'No job of this type is claimed until resume. Running ones run on; enqueues are accepted. options: by.';
CREATE FUNCTION resume(job_type text, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  UPDATE lane l SET paused_at = NULL, paused_by = NULL WHERE l.job_type = resume.job_type;
  IF NOT FOUND THEN
    PERFORM refuse('TN005', format('no job of type %L was ever enqueued or paused', job_type));
  END IF;
  -- All of them, whether they sleep now or not: one may fall asleep before this commits.
  PERFORM pg_notify(worker_channel(w.id), 'work') FROM worker w WHERE w.status = 'live';
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION resume(text, jsonb) IS 'Ends a pause.';

CREATE FUNCTION all_deps_completed(p_job_id uuid, options jsonb DEFAULT '{}') RETURNS boolean LANGUAGE sql STABLE SECURITY DEFINER AS $$
  SELECT NOT EXISTS (SELECT FROM job_dependencies d WHERE d.job_id = p_job_id
    AND NOT EXISTS (SELECT FROM outcome o WHERE o.id = d.depends_on_job_id AND o.status = 'completed'))
$$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION all_deps_completed(uuid, jsonb) IS 'Whether all jobs that this one depends on have completed.';

CREATE FUNCTION drain_worker(p_worker_id uuid, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  UPDATE worker SET drain_requested = true WHERE id = p_worker_id AND status IN ('live', 'draining');
  IF NOT FOUND THEN
    PERFORM refuse('TN005', format('no live worker %s', p_worker_id));
  END IF;
  PERFORM pg_notify(worker_channel(p_worker_id), 'beat');
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION drain_worker(uuid, jsonb) IS 'Asks a worker to stop as on SIGTERM: it claims nothing more, finishes what runs, and ends.';
