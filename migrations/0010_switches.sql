-- breaking: no
-- Switches of the primary: how the database notices one, what a person has to decide, and what was found afterwards.

-- The system identifier and the highest timeline that this installation was seen on; NULL: the server does not tell.
-- unaccepted: it is a copy on another system, and nobody has said that it is the one to use.
-- uncovered: more was lost than any worker remembers. While either is true the gate is on hold.
-- instead_of: a person has said that this server is used in place of one with a timeline up to that.
ALTER TABLE cluster ADD COLUMN system_id bigint, ADD COLUMN timeline int,
  ADD COLUMN unaccepted boolean NOT NULL DEFAULT false, ADD COLUMN uncovered boolean NOT NULL DEFAULT false, ADD COLUMN instead_of int;
-- Did not speak before the window closed.
ALTER TABLE expected ADD COLUMN absent boolean NOT NULL DEFAULT false;

-- One row for each epoch that was opened after a switch, a crash or a restore. Times are of the clock of the server that it was opened on.
CREATE TABLE switch (
  epoch_no bigint PRIMARY KEY,
  cause text NOT NULL CHECK (cause IN ('promotion', 'crash', 'other system', 'unknown')),
  opened_at timestamptz NOT NULL,
  opened_by uuid NOT NULL,
  system_id bigint,
  timeline int,
  server_started_at timestamptz,
  previous_system_id bigint,
  previous_timeline int,
  last_sweep_at timestamptz NOT NULL,  -- by the clock of the server before
  without_primary interval,         -- the longest that a worker was without one, by its own clock
  uncovered_from timestamptz,       -- the last heartbeat that the database shows of the worker that remembers least
  uncovered_until timestamptz,      -- from there on that worker remembers all
  decided_at timestamptz,
  decided_by text,
  decision text,
  closed_at timestamptz,            -- from then on jobs from before were claimed
  first_claim_at timestamptz        -- when one was
);
-- What became of single jobs.
CREATE TABLE switch_job (
  epoch_no bigint NOT NULL,
  job_id uuid NOT NULL,
  run int NOT NULL,
  what text NOT NULL CHECK (what IN ('written_again', 'claimed_again', 'put_back', 'recovered', 'rerun', 'stopped', 'set_aside')),
  worker uuid,
  PRIMARY KEY (epoch_no, job_id, run, what)
);

-- Which server this is. Each part is NULL where the server does not tell: managed services refuse some of these functions.
CREATE FUNCTION server_facts(OUT system_id bigint, OUT timeline int, OUT started_at timestamptz) LANGUAGE plpgsql AS $$
BEGIN
  started_at := pg_postmaster_start_time();
  BEGIN
    SELECT s.system_identifier INTO system_id FROM pg_control_system() s;
  EXCEPTION WHEN OTHERS THEN NULL;
  END;
  BEGIN
    -- Not pg_control_checkpoint(): after a promotion that lags until the next checkpoint has ended.
    timeline := CASE WHEN NOT pg_is_in_recovery() THEN ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int END;
  EXCEPTION WHEN OTHERS THEN NULL;
  END;
END $$;

UPDATE cluster c SET system_id = f.system_id, timeline = f.timeline FROM server_facts() f;

CREATE FUNCTION probe(p_worker_id uuid, options jsonb DEFAULT '{}') RETURNS TABLE (
  in_recovery boolean, read_only boolean, synchronous boolean, system_id bigint, timeline int, started_at timestamptz,
  epoch uuid, epoch_no bigint, gate text, in_epoch boolean, beat bigint, swept_at timestamptz,
  received bigint, instead_of int
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
    INSERT INTO switch (epoch_no, cause, opened_at, opened_by, system_id, timeline, server_started_at, previous_system_id, previous_timeline, last_sweep_at)
      SELECT v_epoch_no, CASE WHEN v_other THEN 'other system' WHEN v_server.timeline <> v_old.timeline THEN 'promotion'
          WHEN v_server.timeline = v_old.timeline THEN 'crash' ELSE 'unknown' END,
        c.opened_at, p_worker_id, v_server.system_id, v_server.timeline, v_server.started_at, v_old.system_id, v_old.timeline, s.swept_at
      FROM cluster c, sweep s
      ON CONFLICT DO NOTHING;
  END IF;
  -- A server that does not tell what it is changes nothing of what is known.
  UPDATE cluster c SET system_id = coalesce(v_server.system_id, c.system_id), timeline = coalesce(v_server.timeline, c.timeline)
    WHERE c.system_id <> v_server.system_id OR c.timeline <> v_server.timeline
      OR c.system_id IS NULL AND v_server.system_id IS NOT NULL OR c.timeline IS NULL AND v_server.timeline IS NOT NULL;
  RETURN QUERY SELECT c.epoch, c.epoch_no, c.gate, b.beat FROM cluster c LEFT JOIN beat b ON b.worker = p_worker_id;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION open_epoch(uuid, jsonb) IS
  'The present epoch, opened first if the last one ended in a crash, switch or restore, or on another system; with the last beat of this worker that the database shows (NULL: it does not know the worker). options: epoch_no, the highest that the caller has seen.';

-- Notes what became of a job in the switch that opened the present epoch.
CREATE FUNCTION note_switch(p_epoch_no bigint, p_worker uuid, p_job uuid, p_run int, p_what text) RETURNS void LANGUAGE sql AS $$
  INSERT INTO switch_job (epoch_no, job_id, run, what, worker) SELECT p_epoch_no, p_job, p_run, p_what, p_worker
    WHERE EXISTS (SELECT FROM switch s WHERE s.epoch_no = p_epoch_no) ON CONFLICT DO NOTHING
$$;

-- The window closes when all expected workers have spoken, or the lease of those who have not has surely ended. The latter is for
-- the sweep alone to say: it knows whether they could speak in that time.
CREATE OR REPLACE FUNCTION close_window(p_by_time boolean) RETURNS boolean LANGUAGE plpgsql AS $$
DECLARE
  v_epoch_no bigint;
BEGIN
  UPDATE cluster c SET gate = 'open' WHERE c.gate = 'window' AND NOT EXISTS (
    SELECT FROM expected e WHERE e.spoken_at IS NULL AND NOT (p_by_time AND c.opened_at + e.lease_ttl <= clock_timestamp()))
    RETURNING c.epoch_no INTO v_epoch_no;
  IF v_epoch_no IS NULL THEN RETURN false; END IF;
  -- Who is speaking at this moment is passed by: it waits for the row above, and is not absent.
  UPDATE expected e SET absent = true FROM (SELECT x.worker FROM expected x WHERE x.spoken_at IS NULL FOR UPDATE SKIP LOCKED) x WHERE e.worker = x.worker;
  UPDATE switch SET closed_at = clock_timestamp() WHERE epoch_no = v_epoch_no AND closed_at IS NULL;
  -- All of them, whether they sleep now or not: jobs from before can be claimed from now on.
  PERFORM pg_notify(worker_channel(w.id), 'work') FROM worker w WHERE w.status = 'live';
  RETURN true;
END $$;

-- The beat row is locked before the status is written, and a heartbeat writes it before it reads the status: one of them sees the other.
CREATE OR REPLACE FUNCTION declare_lost(p_workers uuid[], p_epoch_no bigint, p_status text DEFAULT 'lost') RETURNS int LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM beat WHERE worker = ANY (p_workers) ORDER BY worker FOR UPDATE;
  UPDATE worker SET status = p_status, ended_at = clock_timestamp() WHERE id = ANY (p_workers) AND status IN ('live', 'draining');
  DELETE FROM sleeper WHERE worker = ANY (p_workers);
  UPDATE expected SET spoken_at = clock_timestamp(), absent = p_status = 'lost' WHERE worker = ANY (p_workers) AND spoken_at IS NULL;
  RETURN CASE WHEN (SELECT c.gate = 'open' FROM cluster c) THEN recover(p_epoch_no, 100000) ELSE 0 END;
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

-- While workers re-attach, the database may not show what became of a job.
CREATE OR REPLACE FUNCTION assert_gate(p_id uuid) RETURNS void LANGUAGE plpgsql AS $$
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
  IF NOT EXISTS (SELECT FROM here h WHERE h.epoch = v_cluster.epoch) OR v_cluster.gate = 'window' AND (coalesce(v_pos, 0) <= v_cluster.mark
    -- A follow-up job that a re-attach put in again stands beyond the mark, and its worker may be about to say what became of it.
    OR EXISTS (SELECT FROM ready r WHERE r.id = p_id AND r.flags & 16 <> 0 AND (r.lane, r.priority, r.pos) IN (
      SELECT q.lane, q.priority, q.pos FROM requeued q WHERE q.id = p_id UNION ALL SELECT j.lane, j.priority, j.pos FROM job j WHERE j.id = p_id)))
  THEN
    PERFORM refuse('TN002', 'workers are re-attaching after a switch or restart of the database', 'Try again in a moment.');
  ELSIF v_cluster.gate = 'hold' THEN
    PERFORM refuse('TN003', 'the gate is on hold after a switch: ' || hold_reason(v_cluster), 'Nothing is claimed until a person decides: see `tenure cluster status`.');
  END IF;
END $$;

CREATE FUNCTION hold_reason(c cluster) RETURNS text LANGUAGE sql STABLE AS $$
  SELECT concat_ws('; ',
    CASE WHEN c.unaccepted THEN 'this database is a copy on another system (pg_upgrade, restore of a dump, clone) and nobody has accepted it' END,
    CASE WHEN c.uncovered THEN 'it was restored to a time from before what the workers remember, so jobs may run again that had ended' END)
$$;

-- After a decision: open when nobody is waited for, else a window that begins now.
CREATE FUNCTION leave_hold(p_epoch_no bigint, p_by text, p_decision text) RETURNS text LANGUAGE plpgsql AS $$
BEGIN
  UPDATE switch SET decided_at = clock_timestamp(), decided_by = p_by, decision = concat_ws('; ', decision, p_decision) WHERE epoch_no = p_epoch_no;
  UPDATE cluster SET gate = 'window', opened_at = clock_timestamp() WHERE gate = 'hold' AND NOT unaccepted AND NOT uncovered;
  PERFORM close_window(false);
  RETURN (SELECT c.gate FROM cluster c);
END $$;

CREATE FUNCTION accept_cluster(reason text, options jsonb DEFAULT '{}') RETURNS text LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_by text := coalesce(options ->> 'by', session_user);
  v_timeline int := (options ->> 'timeline')::int;
  v_epoch_no bigint;
BEGIN
  IF coalesce(btrim(reason), '') = '' THEN
    PERFORM refuse('TN007', 'reason is missing: say why this server is the one to use');
  END IF;
  UPDATE cluster c SET instead_of = v_timeline WHERE v_timeline > coalesce(c.instead_of, 0);
  UPDATE cluster c SET unaccepted = false WHERE c.unaccepted RETURNING c.epoch_no INTO v_epoch_no;
  IF v_epoch_no IS NULL AND v_timeline IS NULL THEN
    PERFORM refuse('TN006', 'there is nothing to accept: this database is on the system on which it was', 'See `tenure cluster status`.');
  END IF;
  RETURN leave_hold(v_epoch_no, v_by, 'accepted: ' || reason);
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION accept_cluster(text, jsonb) IS
  'A person says that this copy, on another system than before, is the one to use; or, with options.timeline, that this server is used in place of one with a timeline up to that. No daemon may work on the other one any more. Answers with the gate: window, open, or hold when something else is to be decided. options: by, timeline.';

-- Makes dead letters of all jobs that can have run in the span that nobody remembers. Answers with their number.
CREATE FUNCTION set_aside(c cluster) RETURNS bigint LANGUAGE plpgsql AS $$
DECLARE
  v_error text := format('it may have run already: the database was restored to an earlier time (switch %s), and no worker remembers what ran then', c.epoch_no);
  v_count bigint;
BEGIN
  WITH waits AS (
    DELETE FROM ready r WHERE r.pos <= c.mark RETURNING r.id, r.lane, r.run, r.attempts, r.flags
  ), found AS (
    DELETE FROM requeued q USING waits w WHERE q.id = w.id AND w.flags & 2 <> 0
  ), due AS (
    DELETE FROM later l WHERE l.due <= c.opened_at AND l.waits_for <> 'window' RETURNING l.id, l.lane, l.run, l.attempts, l.flags
  ), orphan AS (
    DELETE FROM lease l USING (SELECT o.id FROM lease o WHERE o.until IS NULL AND o.epoch_no < c.epoch_no
        AND NOT EXISTS (SELECT FROM expected e WHERE e.worker = o.worker AND e.spoken_at IS NOT NULL AND NOT e.absent) ORDER BY o.id FOR UPDATE SKIP LOCKED) o
    WHERE l.id = o.id RETURNING l.id, l.lane, l.run, l.attempts, l.flags
  ), aside AS (
    SELECT * FROM waits UNION ALL SELECT * FROM due UNION ALL SELECT * FROM orphan
  ), ended AS (
    INSERT INTO outcome (id, status, run, attempts, epoch_no, lane, flags, finished_at, error)
    SELECT a.id, 'failed', a.run + 1, a.attempts, c.epoch_no, a.lane, a.flags & 5, clock_timestamp(), v_error FROM aside a
  ), letter AS (
    INSERT INTO dead_letter (id, job_id, lane, run, attempts, last_error, failed_at)
    SELECT random_uuid(), a.id, a.lane, a.run + 1, a.attempts, v_error, clock_timestamp() FROM aside a
  ), unkeyed AS (
    DELETE FROM key_owner k USING aside a JOIN job j ON j.id = a.id
    WHERE a.flags & 1 <> 0 AND k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key AND k.id = a.id
  ), noted AS (
    INSERT INTO switch_job (epoch_no, job_id, run, what) SELECT c.epoch_no, a.id, a.run + 1, 'set_aside' FROM aside a ON CONFLICT DO NOTHING
  )
  SELECT count(*) INTO v_count FROM aside;
  RETURN v_count;
END $$;

CREATE FUNCTION resume_cluster(options jsonb DEFAULT '{}') RETURNS TABLE (gate text, set_aside bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_cluster cluster;
  v_by text := coalesce(options ->> 'by', session_user);
  v_rerun boolean := coalesce((options ->> 'rerun')::boolean, false);
  v_aside bigint := 0;
BEGIN
  SELECT * INTO v_cluster FROM cluster FOR UPDATE;
  IF NOT EXISTS (SELECT FROM here h WHERE h.epoch = v_cluster.epoch) THEN
    PERFORM refuse('TN002', 'no worker has opened an epoch on this server yet', 'Start a daemon, or wait for one, and try again.');
  ELSIF NOT v_cluster.uncovered THEN
    PERFORM refuse('TN006', 'there is nothing to resume: no lost span waits for a decision', 'See `tenure cluster status`.');
  END IF;
  IF NOT v_rerun THEN
    v_aside := set_aside(v_cluster);
  END IF;
  UPDATE cluster SET uncovered = false;
  RETURN QUERY SELECT leave_hold(v_cluster.epoch_no, v_by,
    CASE WHEN v_rerun THEN 'resumed: what is there runs again' ELSE format('resumed: %s jobs were set aside as dead letters', v_aside) END), v_aside;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION resume_cluster(jsonb) IS
  'Ends the hold after a restore to a time from before what the workers remember. Jobs that can have run in the lost span become dead letters for people to review, or with options.rerun = true run as they stand. Answers with the gate and the number of dead letters. options: by, rerun.';

CREATE FUNCTION retry_switch(epoch_no bigint, options jsonb DEFAULT '{}') RETURNS TABLE (job_id uuid, answer text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_by text := coalesce(options ->> 'by', session_user);
  o outcome;
  v_job record;
BEGIN
  IF NOT EXISTS (SELECT FROM switch s WHERE s.epoch_no = retry_switch.epoch_no) THEN
    PERFORM refuse('TN005', format('no switch %s', retry_switch.epoch_no), 'See `tenure cluster switches list`.');
  END IF;
  FOR v_job IN SELECT DISTINCT w.job_id FROM switch_job w WHERE w.epoch_no = retry_switch.epoch_no AND w.what = 'written_again' ORDER BY 1 LOOP
    PERFORM assert_gate(v_job.job_id);
    SELECT * INTO o FROM outcome x WHERE x.id = v_job.job_id FOR UPDATE;
    job_id := v_job.job_id;
    -- Of the run that was written again: a person or a retry may have gone on from there.
    IF o.id IS NULL OR NOT EXISTS (SELECT FROM switch_job w WHERE w.epoch_no = retry_switch.epoch_no AND w.job_id = o.id AND w.run = o.run AND w.what = 'written_again') THEN
      answer := 'has gone on since: ' || coalesce(o.status, status_of(v_job.job_id), 'changing its state');
    ELSIF EXISTS (SELECT FROM key_owner k JOIN job j ON j.id = o.id WHERE k.job_type = j.job_type AND k.tenant = j.tenant AND k.key = j.unique_key) THEN
      answer := 'refused: another live job has its unique key';
    ELSE
      PERFORM run_again(o, v_by, format('retried after switch %s', retry_switch.epoch_no), NULL);
      answer := 'pending';
    END IF;
    RETURN NEXT;
  END LOOP;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION retry_switch(bigint, jsonb) IS
  'Runs again all jobs whose end was written again in this switch, where that is still how they stand: for handlers whose effects were in this database and so were lost with it. Answers for each: pending, or why not. options: by.';

CREATE VIEW switches AS
  SELECT s.epoch_no, s.cause, s.opened_at, s.closed_at, s.first_claim_at,
    extract(epoch FROM s.without_primary)::float8 AS without_primary_sec,
    extract(epoch FROM s.closed_at - s.opened_at)::float8 AS window_sec,
    extract(epoch FROM s.first_claim_at - s.opened_at)::float8 AS first_claim_sec,
    coalesce(n.written_again, 0) AS written_again, coalesce(n.claimed_again, 0) AS claimed_again, coalesce(n.put_back, 0) AS put_back,
    coalesce(n.recovered, 0) AS recovered, coalesce(n.rerun, 0) AS rerun, coalesce(n.stopped, 0) AS stopped, coalesce(n.set_aside, 0) AS set_aside,
    (SELECT array_agg(e.worker ORDER BY e.worker) FROM expected e, cluster c WHERE c.epoch_no = s.epoch_no AND (e.absent OR e.spoken_at IS NULL)) AS absent_workers,
    s.uncovered_from, s.uncovered_until, extract(epoch FROM s.uncovered_until - s.uncovered_from)::float8 AS uncovered_sec,
    s.system_id, s.timeline, s.previous_system_id, s.previous_timeline, s.server_started_at, s.last_sweep_at, s.opened_by,
    s.decision, s.decided_by, s.decided_at
  FROM switch s LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE w.what = 'written_again') AS written_again, count(*) FILTER (WHERE w.what = 'claimed_again') AS claimed_again,
      count(*) FILTER (WHERE w.what = 'put_back') AS put_back, count(*) FILTER (WHERE w.what = 'recovered') AS recovered,
      count(*) FILTER (WHERE w.what = 'rerun') AS rerun, count(*) FILTER (WHERE w.what = 'stopped') AS stopped,
      count(*) FILTER (WHERE w.what = 'set_aside') AS set_aside
    FROM switch_job w WHERE w.epoch_no = s.epoch_no) n ON true;
COMMENT ON VIEW switches IS
  'One row for each switch, crash or restore of the database. Times are of the clock of the server after it. written_again: ends that the server had lost and workers remembered; claimed_again: runs that went on and whose claim was lost; put_back: jobs whose enqueue was lost; recovered: runs of workers that did not come back; rerun: given back because their effects were lost; stopped: handlers whose job had gone on elsewhere; set_aside: made dead letters by resume_cluster.';

CREATE VIEW switch_jobs AS
  SELECT w.epoch_no, w.job_id, w.run, w.what, w.worker AS worker_id, j.job_type, a.status
  FROM switch_job w LEFT JOIN job j ON j.id = w.job_id LEFT JOIN jobs_all a ON a.id = w.job_id;
COMMENT ON VIEW switch_jobs IS 'What became of single jobs in each switch, with their present status.';

CREATE VIEW cluster_status AS
  SELECT c.installation, c.epoch_no, c.gate, nullif(hold_reason(c), '') AS hold_reason, c.opened_at, c.system_id, c.timeline,
    (SELECT array_agg(e.worker ORDER BY e.worker) FROM expected e WHERE c.gate <> 'open' AND e.spoken_at IS NULL) AS waits_for
  FROM cluster c;
COMMENT ON VIEW cluster_status IS
  'Where this installation stands. gate: open; window (workers re-attach, jobs from before the switch are not claimed yet; waits_for are those that have not spoken); hold (nothing is claimed until accept_cluster or resume_cluster, hold_reason says why).';
