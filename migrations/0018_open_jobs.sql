-- breaking: no
-- Jobs that a handler has accepted and finishes later (202): their leases have a time of their own (hold), and whoever has the token of
-- such a job ends it through any daemon.

DROP FUNCTION hold(uuid, uuid, jsonb, jsonb);
CREATE FUNCTION hold(p_worker_id uuid, p_epoch uuid, p_items jsonb, options jsonb DEFAULT '{}')
RETURNS TABLE (job uuid, token uuid, answer text, left_ms bigint, stop text) LANGUAGE plpgsql SECURITY DEFINER AS $$
#variable_conflict use_column
DECLARE
  v_at_least boolean := coalesce((options ->> 'at_least')::boolean, false);
BEGIN
  PERFORM assert_epoch(p_epoch);
  PERFORM assert_objects(p_items, 'the items');
  IF EXISTS (SELECT FROM jsonb_to_recordset(p_items) i(job uuid, token uuid, for_ms bigint)
    WHERE i.job IS NULL OR i.token IS NULL OR i.for_ms IS NULL AND NOT v_at_least OR i.for_ms <= 0)
  THEN
    PERFORM refuse('TN007', 'an item lacks job, token or a for_ms above zero');
  END IF;
  -- By id, since several daemons may hold the same jobs.
  PERFORM FROM lease l WHERE l.id IN (SELECT i.job FROM jsonb_to_recordset(p_items) i(job uuid, for_ms bigint) WHERE i.for_ms IS NOT NULL)
    ORDER BY l.id FOR NO KEY UPDATE OF l;
  UPDATE lease l SET until = clock_timestamp() + i.for_ms * interval '1 ms'
    FROM jsonb_to_recordset(p_items) i(job uuid, token uuid, for_ms bigint)
    WHERE l.id = i.job AND l.token = i.token AND i.for_ms IS NOT NULL
      AND NOT (v_at_least AND coalesce(l.until >= clock_timestamp() + i.for_ms * interval '1 ms', false));
  RETURN QUERY
    SELECT i.job, i.token, CASE WHEN l.id IS NULL THEN 'history' ELSE 'done' END,
      CASE WHEN l.until IS NOT NULL THEN greatest(0, extract(epoch FROM l.until - clock_timestamp()) * 1000)::bigint END, s.kind
    FROM jsonb_to_recordset(p_items) i(job uuid, token uuid)
    LEFT JOIN lease l ON l.id = i.job AND l.token = i.token LEFT JOIN stop_request s ON s.id = l.id;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION hold(uuid, uuid, jsonb, jsonb) IS
  'Gives leases a time of their own: items of job, token, for_ms. From then on they do not depend on any worker''s heartbeat; any worker may hold them again or end them. Answers for each: done, or history: the lease is gone; left_ms: how much of its time is left; stop: what a person asked for (cancel | complete | dead), which is carried out when the run ends. options: at_least, never shortens the time, and an item without for_ms only asks.';

-- Requests to stop a run that has ended meanwhile without carrying them out, and those about a job that goes on elsewhere: its worker
-- is told by its heartbeat and ends it; when that worker is gone nobody else would.
CREATE OR REPLACE FUNCTION carry_out_stops() RETURNS int LANGUAGE plpgsql AS $$
DECLARE
  s stop_request;
  v_ends run_end[];
  v_count int := 0;
BEGIN
  SELECT array_agg(run_end_of(l, 'released')) INTO v_ends FROM (
    SELECT l.* FROM lease l JOIN stop_request r ON r.id = l.id
    WHERE l.until IS NOT NULL AND NOT EXISTS (SELECT FROM worker w WHERE w.id = l.worker AND w.status IN ('live', 'draining'))
    ORDER BY l.id LIMIT 1000 FOR UPDATE OF l SKIP LOCKED) l;
  IF v_ends IS NOT NULL THEN
    PERFORM end_runs(NULL, (SELECT c.epoch_no FROM cluster c), v_ends);
    v_count := cardinality(v_ends);
  END IF;
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

SELECT grant_roles();
