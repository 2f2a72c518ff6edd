-- breaking: yes
-- Time: what becomes due, who is lost, what is recovered. One worker at a time sweeps, once a second.

-- Moves due jobs to ready. In a window nothing from before it may be claimed, so they wait.
CREATE FUNCTION promote_due(p_limit int) RETURNS int LANGUAGE plpgsql AS $$
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
      d.flags & 5 | 2 | CASE WHEN row_number() OVER (PARTITION BY d.lane) <= 4 THEN 8 ELSE 0 END, greatest(d.due, now() - interval '1 day')
    FROM (SELECT o.*, nextval('ready_pos') AS pos FROM (SELECT * FROM due ORDER BY due) o) d RETURNING id, lane, priority, pos
  )
  INSERT INTO requeued (id, lane, priority, pos) SELECT q.id, q.lane, q.priority, q.pos FROM queued q;
  GET DIAGNOSTICS v_moved = ROW_COUNT;
  RETURN v_moved;
END $$;

-- Ends the leases that nobody renews any more: their own time has passed, or their worker is not live. A row that another
-- transaction has locked (assert_lease) is passed by and tried again at the next sweep; it takes no place in the limit.
CREATE FUNCTION recover(p_epoch_no bigint, p_limit int) RETURNS int LANGUAGE plpgsql AS $$
#variable_conflict use_column
DECLARE
  v_ends run_end[];
BEGIN
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
  PERFORM end_runs(NULL, p_epoch_no, v_ends);
  RETURN cardinality(v_ends);
END $$;

-- The beat row is locked before the status is written, and a heartbeat writes it before it reads the status: one of them sees the other.
CREATE FUNCTION declare_lost(p_workers uuid[], p_epoch_no bigint, p_status text DEFAULT 'lost') RETURNS int LANGUAGE plpgsql AS $$
BEGIN
  PERFORM FROM beat WHERE worker = ANY (p_workers) ORDER BY worker FOR UPDATE;
  UPDATE worker SET status = p_status, ended_at = clock_timestamp() WHERE id = ANY (p_workers) AND status IN ('live', 'draining');
  DELETE FROM sleeper WHERE worker = ANY (p_workers);
  UPDATE expected SET spoken_at = clock_timestamp() WHERE worker = ANY (p_workers) AND spoken_at IS NULL;
  RETURN CASE WHEN (SELECT c.gate = 'open' FROM cluster c) THEN recover(p_epoch_no, 100000) ELSE 0 END;
END $$;

-- The window closes when all expected workers have spoken, or the lease of those who have not has surely ended. The latter is for
-- the sweep alone to say: it knows whether they could speak in that time.
CREATE FUNCTION close_window(p_by_time boolean) RETURNS boolean LANGUAGE plpgsql AS $$
BEGIN
  UPDATE cluster c SET gate = 'open' WHERE c.gate = 'window' AND NOT EXISTS (
    SELECT FROM expected e WHERE e.spoken_at IS NULL AND NOT (p_by_time AND c.opened_at + e.lease_ttl <= clock_timestamp()));
  RETURN FOUND;
END $$;

-- Requests to stop a run that has ended meanwhile without carrying them out.
CREATE FUNCTION carry_out_stops() RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  s stop_request;
  v_count int := 0;
BEGIN
  FOR s IN SELECT r.* FROM stop_request r WHERE NOT EXISTS (SELECT FROM lease l WHERE l.id = r.id)
    ORDER BY r.id LIMIT 1000 FOR UPDATE OF r SKIP LOCKED
  LOOP
    -- When it neither waits nor has ended it was claimed just now, and whoever ends that run carries it out.
    IF end_waiting(s.id, s.kind, s.requested_by, s.reason) OR EXISTS (SELECT FROM outcome o WHERE o.id = s.id)
      OR NOT EXISTS (SELECT FROM job j WHERE j.id = s.id)
    THEN
      DELETE FROM stop_request WHERE id = s.id;
      v_count := v_count + 1;
    END IF;
  END LOOP;
  RETURN v_count;
END $$;

CREATE FUNCTION sweep(p_epoch uuid, options jsonb DEFAULT '{}')
RETURNS TABLE (swept boolean, gate text, promoted int, recovered int, lost int, next_due_ms bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_epoch_no bigint := assert_epoch(p_epoch);
  v_last timestamptz;
  v_now timestamptz;
  v_lost uuid[];
  v_promoted int := 0;
  v_recovered int := 0;
BEGIN
  SELECT s.swept_at INTO v_last FROM sweep s FOR UPDATE SKIP LOCKED;
  v_now := clock_timestamp();
  IF NOT FOUND OR v_now - v_last BETWEEN interval '0' AND interval '0.5 s' THEN
    -- Another worker does it now, or just did.
    RETURN QUERY SELECT false, c.gate, 0, 0, 0, NULL::bigint FROM cluster c;
    RETURN;
  END IF;
  UPDATE sweep SET swept_at = v_now;
  IF v_now < v_last OR v_now > v_last + interval '3 s' THEN
    -- Nobody could renew in that time: it counts against nobody. Who was live then starts anew.
    PERFORM FROM beat b ORDER BY b.worker FOR UPDATE;
    UPDATE beat b SET beat_at = v_now FROM worker w WHERE w.id = b.worker AND b.beat_at + w.lease_ttl >= v_last AND w.status IN ('live', 'draining');
    UPDATE lease SET until = until + (v_now - v_last) WHERE until >= v_last;
    -- So does a window: its time is that in which those who are waited for could speak.
    UPDATE cluster SET opened_at = v_now WHERE gate = 'window';
    RETURN QUERY SELECT true, c.gate, 0, 0, 0, 0::bigint FROM cluster c;
    RETURN;
  END IF;
  PERFORM close_window(true);
  IF (SELECT c.gate = 'open' FROM cluster c) THEN
    SELECT array_agg(b.worker) INTO v_lost FROM beat b JOIN worker w ON w.id = b.worker
      WHERE w.status IN ('live', 'draining') AND b.beat_at + w.lease_ttl < v_now;
    IF v_lost IS NOT NULL THEN
      -- Locked, then looked at again: a heartbeat that came meanwhile wins, and so does one that has the lock.
      SELECT array_agg(b.worker) INTO v_lost
        FROM (SELECT b.worker, b.beat_at FROM beat b WHERE b.worker = ANY (v_lost) ORDER BY b.worker FOR UPDATE SKIP LOCKED) b
        JOIN worker w ON w.id = b.worker WHERE b.beat_at + w.lease_ttl < v_now;
    END IF;
    IF v_lost IS NOT NULL THEN
      v_recovered := declare_lost(v_lost, v_epoch_no);
    END IF;
    v_recovered := v_recovered + recover(v_epoch_no, 5000);
    PERFORM carry_out_stops();
    v_promoted := promote_due(5000);
    DELETE FROM revocation r WHERE r.revoked_at < v_now - interval '1 hour';
    DELETE FROM beat b USING worker w WHERE w.id = b.worker AND w.ended_at < v_now - interval '1 day';
    DELETE FROM worker w WHERE w.ended_at < v_now - interval '1 day';
  END IF;
  RETURN QUERY SELECT true, c.gate, v_promoted, v_recovered, coalesce(cardinality(v_lost), 0),
    (SELECT greatest(0, ceil(extract(epoch FROM l.due - clock_timestamp()) * 1000))::bigint FROM later l WHERE c.gate = 'open' AND l.due < v_now + interval '1 hour' ORDER BY l.due LIMIT 1)
    FROM cluster c;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION sweep(uuid, jsonb) IS
  'Once a second, by any worker: recovers what timed out, makes due jobs ready, closes a window. A gap of over 3 s since the last sweep, or a clock that went back, recovers nothing: nobody could renew in that time. next_due_ms: when promote should be called.';

CREATE FUNCTION promote(p_epoch uuid, options jsonb DEFAULT '{}') RETURNS TABLE (promoted int, next_due_ms bigint) LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_promoted int;
BEGIN
  PERFORM assert_epoch(p_epoch);
  v_promoted := promote_due(5000);
  RETURN QUERY SELECT v_promoted,
    (SELECT greatest(0, ceil(extract(epoch FROM l.due - clock_timestamp()) * 1000))::bigint FROM later l WHERE l.due < now() + interval '1 hour' ORDER BY l.due LIMIT 1);
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION promote(uuid, jsonb) IS 'Makes due jobs ready, at most 5,000. next_due_ms: when the next is due, if within an hour.';

CREATE FUNCTION deregister_worker(p_worker_id uuid, p_epoch uuid, options jsonb DEFAULT '{}') RETURNS void LANGUAGE plpgsql SECURITY DEFINER AS $$
BEGIN
  PERFORM declare_lost(ARRAY[p_worker_id], assert_epoch(p_epoch), 'stopped');
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION deregister_worker(uuid, uuid, jsonb) IS 'The worker leaves. All its handlers must be dead and its jobs released before; what it still holds is recovered as lost.';
