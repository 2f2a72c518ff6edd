-- breaking: no
-- What a review found in 0010 to 0012: a re-attach that met a lock has not spoken; what a person says about a timeline begins an epoch and counts
-- once; a run whose effects were lost cannot end its job.

-- accepted, accepted_by: what a person said about a timeline, for the record of the epoch that this begins.
ALTER TABLE cluster ADD COLUMN accepted text, ADD COLUMN accepted_by text;
-- When it last said a part of what it has to say.
ALTER TABLE expected ADD COLUMN heard_at timestamptz;
ALTER TABLE switch DROP CONSTRAINT switch_cause_check,
  ADD CONSTRAINT switch_cause_check CHECK (cause IN ('promotion', 'crash', 'accepted', 'other system', 'unknown'));

-- The runs with bit 64 of lease.flags, so that finish need not look at the leases of all others.
CREATE TABLE given_up (
  token uuid PRIMARY KEY,
  job_id uuid NOT NULL
);
INSERT INTO given_up (token, job_id) SELECT l.token, l.id FROM lease l WHERE l.flags & 64 <> 0;

-- What it answers has grown.
DROP FUNCTION probe(uuid, jsonb);
CREATE FUNCTION probe(p_worker_id uuid, options jsonb DEFAULT '{}') RETURNS TABLE (
  in_recovery boolean, read_only boolean, synchronous boolean, system_id bigint, timeline int, started_at timestamptz,
  epoch uuid, epoch_no bigint, gate text, in_epoch boolean, beat bigint, swept_at timestamptz,
  received bigint, instead_of int, installation uuid
) LANGUAGE plpgsql STABLE SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_cluster cluster;
BEGIN
  in_recovery := pg_is_in_recovery();
  read_only := current_setting('default_transaction_read_only')::boolean;
  synchronous := current_setting('synchronous_standby_names') <> '';
  SELECT f.system_id, f.timeline, f.started_at INTO system_id, timeline, started_at FROM server_facts() f;
  SELECT * INTO v_cluster FROM cluster;
  epoch := v_cluster.epoch;
  epoch_no := v_cluster.epoch_no;
  gate := v_cluster.gate;
  IF NOT in_recovery THEN
    -- A standby cannot read an UNLOGGED table.
    in_epoch := EXISTS (SELECT FROM here h WHERE h.epoch = v_cluster.epoch) AND coalesce(v_cluster.system_id = system_id, true);
  END IF;
  beat := (SELECT b.beat FROM beat b WHERE b.worker = p_worker_id);
  swept_at := (SELECT s.swept_at FROM sweep s);
  received := pg_last_wal_receive_lsn() - '0/0'::pg_lsn;
  instead_of := v_cluster.instead_of;
  installation := v_cluster.installation;
  RETURN NEXT;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION probe(uuid, jsonb) IS
  'What this server is and what it shows, also on a standby. in_epoch: the epoch is good here; false: somebody must call open_epoch; NULL on a standby. beat: the last heartbeat of this worker that it shows; all that the worker was told before it sent that one is there too. received: how much WAL a standby has received, in bytes. instead_of: a person has said that this server is used in place of one with a timeline up to that.';

-- Whoever comes first after a crash, a promotion or a restore opens the new epoch.
CREATE OR REPLACE FUNCTION open_epoch(p_worker_id uuid, options jsonb DEFAULT '{}')
RETURNS TABLE (epoch uuid, epoch_no bigint, gate text, beat bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_old cluster;
  v_epoch uuid := random_uuid();
  v_epoch_no bigint;
  v_server record;
  v_other boolean;
BEGIN
  SELECT * INTO v_old FROM cluster FOR UPDATE;
  SELECT * INTO v_server FROM server_facts();
  -- A copy made by pg_upgrade or pg_dump has `here` too, so it is known by the identity of its system alone.
  v_other := coalesce(v_old.system_id <> v_server.system_id, false);
  IF v_other OR NOT EXISTS (SELECT FROM here h WHERE h.epoch = v_old.epoch) THEN
    IF v_other THEN
      -- A copy made by logical replication has no values of sequences.
      PERFORM setval('ready_pos', greatest(nextval('ready_pos'), (SELECT max(r.pos) FROM ready r)));
    END IF;
    DELETE FROM here;
    DELETE FROM expected;
    INSERT INTO expected (worker, lease_ttl) SELECT w.id, w.lease_ttl FROM worker w WHERE w.status IN ('live', 'draining');
    IF NOT FOUND THEN
      -- A worker that came alone may be part of what was lost, and nobody else can name it: it is waited for under no name.
      INSERT INTO expected (worker, lease_ttl)
        SELECT '00000000-0000-0000-0000-000000000000', coalesce(max(w.lease_ttl), interval '60 s') FROM worker w;
    END IF;
    v_epoch_no := greatest(v_old.epoch_no, (options ->> 'epoch_no')::bigint) + 1;
    -- Only what stood in ready at this moment can have been claimed or finished in the lost tail.
    UPDATE cluster c SET epoch = v_epoch, epoch_no = v_epoch_no, mark = nextval('ready_pos'), opened_at = clock_timestamp(),
      gate = CASE WHEN v_old.gate = 'hold' OR v_other THEN 'hold' ELSE 'window' END, unaccepted = c.unaccepted OR v_other;
    INSERT INTO here (epoch) VALUES (v_epoch);
    INSERT INTO switch (epoch_no, cause, opened_at, opened_by, system_id, timeline, server_started_at, previous_system_id, previous_timeline, last_sweep_at, decided_at, decided_by, decision)
      SELECT v_epoch_no, CASE WHEN v_other THEN 'other system' WHEN c.accepted IS NOT NULL THEN 'accepted' WHEN v_server.timeline <> v_old.timeline THEN 'promotion'
          WHEN v_server.timeline = v_old.timeline THEN 'crash' ELSE 'unknown' END,
        c.opened_at, p_worker_id, v_server.system_id, v_server.timeline, v_server.started_at, v_old.system_id, v_old.timeline, s.swept_at,
        CASE WHEN c.accepted IS NOT NULL THEN c.opened_at END, c.accepted_by, c.accepted
      FROM cluster c, sweep s
      ON CONFLICT DO NOTHING;
    UPDATE cluster SET accepted = NULL, accepted_by = NULL WHERE accepted IS NOT NULL;
  END IF;
  -- A server that does not tell what it is changes nothing of what is known.
  UPDATE cluster c SET system_id = coalesce(v_server.system_id, c.system_id), timeline = coalesce(v_server.timeline, c.timeline)
    WHERE c.system_id <> v_server.system_id OR c.timeline <> v_server.timeline
      OR c.system_id IS NULL AND v_server.system_id IS NOT NULL OR c.timeline IS NULL AND v_server.timeline IS NOT NULL;
  RETURN QUERY SELECT c.epoch, c.epoch_no, c.gate, b.beat FROM cluster c LEFT JOIN beat b ON b.worker = p_worker_id;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION open_epoch(uuid, jsonb) IS
  'The present epoch, opened first if the last one ended in a crash, switch or restore, or on another system; with the last beat of this worker that the database shows (NULL: it does not know the worker). options: epoch_no, the highest that the caller has seen.';

-- The window closes when all expected workers have spoken, or the lease of those who have not has surely ended. The latter is for
-- the sweep alone to say: it knows whether they could speak in that time. Who has said a part of what it has to say is not given up
-- before it has been silent for that long. (A clock that was stepped back shows a time that is to come.)
CREATE OR REPLACE FUNCTION close_window(p_by_time boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  v_epoch_no bigint;
BEGIN
  UPDATE cluster c SET gate = 'open' WHERE c.gate = 'window' AND NOT EXISTS (
    SELECT FROM expected e WHERE e.spoken_at IS NULL AND NOT (p_by_time AND greatest(c.opened_at, CASE WHEN e.heard_at <= clock_timestamp() THEN e.heard_at END) + e.lease_ttl <= clock_timestamp()))
    RETURNING c.epoch_no INTO v_epoch_no;
  IF v_epoch_no IS NULL THEN RETURN false; END IF;
  -- Who is speaking at this moment is passed by: it waits for the row above, and is not absent.
  UPDATE expected e SET absent = true FROM (SELECT x.worker FROM expected x WHERE x.spoken_at IS NULL FOR UPDATE SKIP LOCKED) x WHERE e.worker = x.worker;
  UPDATE switch SET closed_at = clock_timestamp() WHERE epoch_no = v_epoch_no AND closed_at IS NULL;
  -- All of them, whether they sleep now or not: jobs from before can be claimed from now on.
  PERFORM pg_notify(worker_channel(w.id), 'work') FROM worker w WHERE w.status = 'live';
  RETURN true;
END $$;

-- Ends the leases that nobody renews any more: their own time has passed, or their worker is not live. A row that another
-- transaction has locked (assert_lease) is passed by and tried again at the next sweep; it takes no place in the limit.
CREATE OR REPLACE FUNCTION recover(p_epoch_no bigint, p_limit int) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_ends run_end[];
BEGIN
  -- Whether the effects of a run were lost is asked only while it has a lease.
  DELETE FROM effect e USING (
    SELECT x.token, x.xid FROM effect x WHERE NOT EXISTS (SELECT FROM lease l WHERE l.id = x.job_id AND l.token = x.token) FOR UPDATE SKIP LOCKED) x
    WHERE e.token = x.token AND e.xid = x.xid;
  DELETE FROM given_up g USING (
    SELECT x.token FROM given_up x WHERE NOT EXISTS (SELECT FROM lease l WHERE l.id = x.job_id AND l.token = x.token) FOR UPDATE SKIP LOCKED) x
    WHERE g.token = x.token;
  -- A worker that left had ended all that it knew of: what it still holds comes from a claim whose answer it never read.
  SELECT array_agg(CASE
      WHEN l.until IS NOT NULL THEN run_end_of(l, 'lost', 'the lease ran out: nobody renewed it')
      WHEN EXISTS (SELECT FROM worker w WHERE w.id = l.worker AND w.status = 'stopped') THEN run_end_of(l, 'ghost')
      ELSE run_end_of(l, 'lost', 'the worker was lost: no heartbeat within its lease_ttl, or it was known to be dead') END) INTO v_ends
  FROM (
    SELECT l.* FROM lease l
    WHERE l.until < clock_timestamp()
      OR l.until IS NULL AND NOT EXISTS (SELECT FROM worker w WHERE w.id = l.worker AND w.status IN ('live', 'draining'))
    LIMIT p_limit FOR UPDATE OF l SKIP LOCKED) l;
  IF v_ends IS NULL THEN RETURN 0; END IF;
  INSERT INTO switch_job (epoch_no, job_id, run, what, worker)
    SELECT s.epoch_no, l.id, l.run, 'recovered', l.worker FROM unnest(v_ends) e JOIN lease l ON l.id = e.job JOIN switch s ON s.epoch_no = p_epoch_no
    WHERE l.until IS NULL AND l.epoch_no < p_epoch_no AND EXISTS (SELECT FROM expected x WHERE x.worker = l.worker AND x.absent) ON CONFLICT DO NOTHING;
  PERFORM end_runs(NULL, p_epoch_no, v_ends);
  RETURN cardinality(v_ends);
END $$;

CREATE OR REPLACE FUNCTION accept_cluster(reason text, options jsonb DEFAULT '{}') RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_by text := coalesce(options ->> 'by', session_user);
  v_timeline int := (options ->> 'timeline')::int;
  v_epoch_no bigint;
  v_gate text;
BEGIN
  IF coalesce(btrim(reason), '') = '' THEN
    PERFORM refuse('TN007', 'reason is missing: say why this server is the one to use');
  END IF;
  UPDATE cluster c SET instead_of = v_timeline, accepted = format('accepted in place of timeline %s: %s', v_timeline, reason), accepted_by = v_by
    WHERE v_timeline > coalesce(c.instead_of, 0);
  IF FOUND THEN
    -- To this server nothing has happened, but the workers come from another one: all of them re-attach.
    DELETE FROM here;
  ELSIF v_timeline IS NOT NULL THEN
    PERFORM refuse('TN006', format('there is nothing to accept: timeline %s was named here before, or a higher one', v_timeline),
      'If the workers still find this server too old, name the timeline that their log says.');
  END IF;
  UPDATE cluster c SET unaccepted = false WHERE c.unaccepted RETURNING c.epoch_no INTO v_epoch_no;
  IF v_epoch_no IS NULL AND v_timeline IS NULL THEN
    PERFORM refuse('TN006', 'there is nothing to accept: this database is on the system on which it was', 'See `tenure cluster status`.');
  END IF;
  v_gate := leave_hold(v_epoch_no, v_by, 'accepted: ' || reason);
  RETURN CASE WHEN v_gate = 'open' AND NOT EXISTS (SELECT FROM here) THEN 'window' ELSE v_gate END;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION accept_cluster(text, jsonb) IS
  'A person says that this copy, on another system than before, is the one to use; or, with options.timeline, that this server is used in place of one with a timeline up to that. No daemon may work on the other one any more. Answers with the gate: window, open, or hold when something else is to be decided. options: by, timeline.';

CREATE OR REPLACE FUNCTION retry_switch(epoch_no bigint, options jsonb DEFAULT '{}') RETURNS TABLE (job_id uuid, answer text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_by text := coalesce(options ->> 'by', session_user);
  v_job uuid;
  o outcome;
BEGIN
  IF NOT EXISTS (SELECT FROM switch s WHERE s.epoch_no = retry_switch.epoch_no) THEN
    PERFORM refuse('TN005', format('no switch %s', retry_switch.epoch_no), 'See `tenure cluster switches list`.');
  END IF;
  FOR v_job IN
    SELECT DISTINCT w.job_id FROM switch_job w
    WHERE w.epoch_no = retry_switch.epoch_no AND w.what = 'written_again' AND w.job_id > coalesce((options ->> 'after')::uuid, '00000000-0000-0000-0000-000000000000')
    -- Programs of before call it once and say nothing of going on.
    ORDER BY 1 LIMIT CASE WHEN options ? 'after' THEN 1000 END
  LOOP
    PERFORM assert_gate(v_job);
    SELECT * INTO o FROM outcome x WHERE x.id = v_job FOR UPDATE;
    job_id := v_job;
    -- Of the run that was written again: a person or a retry may have gone on from there.
    IF o.id IS NULL OR NOT EXISTS (SELECT FROM switch_job w WHERE w.epoch_no = retry_switch.epoch_no AND w.job_id = o.id AND w.run = o.run AND w.what = 'written_again') THEN
      answer := 'has gone on since: ' || coalesce(o.status, status_of(v_job), 'changing its state');
    ELSE
      BEGIN
        PERFORM run_again(o, v_by, format('retried after switch %s', retry_switch.epoch_no), NULL);
        answer := 'pending';
      EXCEPTION WHEN SQLSTATE 'TN006' THEN
        answer := 'refused: another live job has its unique key';
      END;
    END IF;
    RETURN NEXT;
  END LOOP;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION retry_switch(bigint, jsonb) IS
  'Runs jobs again whose end was written again in this switch, where that is still how they stand: for handlers whose effects were in this database and so were lost with it. By id; with options.after at most 1,000, those with a higher id: call it again with the last id of the answer. Answers for each: pending, or why not. options: by, after.';

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
  IF EXISTS (SELECT FROM given_up) THEN
    -- The handler ended before it could be stopped, perhaps because assert_lease refused it, or its end was on the way: its effects are
    -- lost all the same, and its job runs again.
    v_ends := ARRAY(SELECT CASE WHEN e.kind IN ('completed', 'failed') AND EXISTS (SELECT FROM given_up g WHERE g.token = e.token)
      THEN ROW('released', e.job, e.run, e.token, NULL, false, NULL, NULL, NULL, NULL, NULL, NULL)::run_end ELSE e END FROM unnest(v_ends) e);
  END IF;
  RETURN QUERY SELECT a.job, a.run, a.token, a.answer, a.status FROM unnest(end_runs(p_worker_id, v_epoch_no, v_ends)) a;
END $$ SET search_path FROM CURRENT SET plan_cache_mode = force_generic_plan SET jit = off;
COMMENT ON FUNCTION finish(uuid, uuid, jsonb, jsonb) IS
  'Ends of runs of any kind in one call. Items: kind (completed | failed | released | snoozed), job, run, token, delay_ms (failed: until the next attempt; snoozed, released: until it is ready), final (failed: never again), exit_code, http_status, result, error, log_tail, enqueue (completed: follow-up jobs with ids). Answer for each: done; busy: the job is locked by another transaction, say it again; history: the run had lost its lease, nothing was changed. options: durability, replicated waits for a synchronous standby.';

-- The effects of a run were lost, and its handler is to be stopped: from now on assert_lease refuses it (bit 64 of lease.flags).
-- That it ends means nothing then: finish makes a release of it. Answers: refused | open (its transaction is open on this server, or has
-- committed here meanwhile, so nothing was lost) | busy (somebody else has the lease: ask again).
DROP FUNCTION refuse_effects(uuid, uuid);
CREATE FUNCTION refuse_effects(p_job uuid, p_token uuid) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  -- This lock lets pass what assert_lease takes, and the next one does not.
  PERFORM FROM lease l WHERE l.id = p_job AND l.token = p_token FOR NO KEY UPDATE SKIP LOCKED;
  IF NOT FOUND THEN RETURN 'busy'; END IF;
  PERFORM FROM lease l WHERE l.id = p_job AND l.token = p_token FOR UPDATE SKIP LOCKED;
  IF NOT FOUND OR EXISTS (SELECT FROM effect f WHERE f.token = p_token) THEN RETURN 'open'; END IF;
  UPDATE lease SET flags = flags | 64 WHERE id = p_job;
  INSERT INTO given_up (token, job_id) VALUES (p_token, p_job) ON CONFLICT DO NOTHING;
  RETURN 'refused';
END $$;

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
      FOR v_done IN SELECT a.* FROM unnest(end_runs(p_worker_id, v_epoch_no, v_ends, true)) a LOOP
        IF v_done.fresh AND v_done.token = ANY (v_confirmed || v_rerun) THEN
          PERFORM note_switch(v_epoch_no, p_worker_id, v_done.job, v_done.run, CASE WHEN v_done.token = ANY (v_rerun) THEN 'rerun' ELSE 'written_again' END);
        END IF;
        v_unsaid := v_unsaid OR v_done.answer = 'busy';
        RETURN QUERY SELECT v_done.job, v_done.run, v_done.token, v_done.answer, v_done.status;
      END LOOP;
    END IF;
  END LOOP;
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
COMMENT ON FUNCTION reattach(uuid, uuid, bigint, jsonb, uuid[], jsonb) IS
  'Says all that this worker holds (kind hold) and has finished (as in finish), at any time, as often as wanted. A statement has kind, job, run, token, call, attempt, max_attempts, epoch_no, started_at, until_ms, the keys of finish, and row: the whole job. confirmed: the end had been answered before. rerun: its effects are in this database (see assert_lease). Answers: kept | stop (kill its handler) | rerun (kill it and release the job: its effects were lost) | busy (say all of it again: before that the worker has not spoken) | done | history. p_beat: the last heartbeat that was answered. roster: the live workers that it knew. options: name, version, lease_ttl_ms, heartbeat_ms, job_types, concurrency (its registration, which may have been lost); predecessors: workers known to be dead, whose jobs are then free at once; more: further statements follow in another call, or one of an earlier call was answered busy; no heartbeat comes before the last of them; held: the tokens of the statements of all these calls, since what it does not name goes back with the last; covers: objects of worker, from (all ends are remembered that were answered after this heartbeat was sent) ms (how long ago that was), and formerly (ids under which the same process counted its heartbeats before); without_primary_ms: for how long it found no primary.';

SELECT grant_roles();
