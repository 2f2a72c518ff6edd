-- breaking: no
-- What two primaries at once have done is on record.

-- Completions that came when the run had lost its lease, most often of a worker that reached only an older primary. They change nothing. Where the job was claimed for another run too, before or after, it ran twice.
CREATE TABLE late_completion (
  job_id uuid NOT NULL,
  run int NOT NULL,
  token uuid NOT NULL,
  worker uuid,
  epoch_no bigint NOT NULL,
  said_at timestamptz NOT NULL,
  PRIMARY KEY (job_id, run, token)
);

CREATE FUNCTION note_late_completion() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
  INSERT INTO late_completion (job_id, run, token, worker, epoch_no, said_at)
    SELECT NEW.job_id, NEW.run, NEW.token, NEW.worker, c.epoch_no, clock_timestamp() FROM cluster c ON CONFLICT DO NOTHING;
  RETURN NULL;
END $$ SET search_path FROM CURRENT;
CREATE TRIGGER note_late_completion AFTER INSERT ON attempt FOR EACH ROW WHEN (NOT NEW.applied AND NEW.outcome = 'completed')
  EXECUTE FUNCTION note_late_completion();

CREATE VIEW ran_twice AS
  SELECT t.job_id, t.run, t.worker, t.epoch_no, t.said_at FROM late_completion t
  WHERE NOT EXISTS (SELECT FROM outcome o WHERE o.id = t.job_id AND o.token = t.token)
    AND NOT EXISTS (SELECT FROM attempt a WHERE a.job_id = t.job_id AND a.run = t.run AND a.token = t.token AND a.applied AND a.outcome = 'completed')
    AND (EXISTS (SELECT FROM lease l WHERE l.id = t.job_id AND l.token <> t.token)
      OR EXISTS (SELECT FROM outcome o WHERE o.id = t.job_id AND o.token <> t.token));
COMMENT ON VIEW ran_twice IS
  'Jobs that ran twice: a run completed after it had lost its lease, and another one was or is the one that counts. One row for each such run. epoch_no: the epoch in which the completion was said.';

CREATE OR REPLACE VIEW switches AS
  SELECT s.epoch_no, s.cause, s.opened_at, s.closed_at, s.first_claim_at,
    extract(epoch FROM s.without_primary)::float8 AS without_primary_sec,
    extract(epoch FROM s.closed_at - s.opened_at)::float8 AS window_sec,
    extract(epoch FROM s.first_claim_at - s.opened_at)::float8 AS first_claim_sec,
    coalesce(n.written_again, 0) AS written_again, coalesce(n.claimed_again, 0) AS claimed_again, coalesce(n.put_back, 0) AS put_back,
    coalesce(n.recovered, 0) AS recovered, coalesce(n.rerun, 0) AS rerun, coalesce(n.stopped, 0) AS stopped, coalesce(n.set_aside, 0) AS set_aside,
    (SELECT array_agg(e.worker ORDER BY e.worker) FROM expected e, cluster c WHERE c.epoch_no = s.epoch_no AND (e.absent OR e.spoken_at IS NULL)) AS absent_workers,
    s.uncovered_from, s.uncovered_until, extract(epoch FROM s.uncovered_until - s.uncovered_from)::float8 AS uncovered_sec,
    s.system_id, s.timeline, s.previous_system_id, s.previous_timeline, s.server_started_at, s.last_sweep_at, s.opened_by,
    s.decision, s.decided_by, s.decided_at, (SELECT count(*) FROM ran_twice t WHERE t.epoch_no = s.epoch_no) AS ran_twice
  FROM switch s LEFT JOIN LATERAL (
    SELECT count(*) FILTER (WHERE w.what = 'written_again') AS written_again, count(*) FILTER (WHERE w.what = 'claimed_again') AS claimed_again,
      count(*) FILTER (WHERE w.what = 'put_back') AS put_back, count(*) FILTER (WHERE w.what = 'recovered') AS recovered,
      count(*) FILTER (WHERE w.what = 'rerun') AS rerun, count(*) FILTER (WHERE w.what = 'stopped') AS stopped,
      count(*) FILTER (WHERE w.what = 'set_aside') AS set_aside
    FROM switch_job w WHERE w.epoch_no = s.epoch_no) n ON true;
COMMENT ON VIEW switches IS
  'One row for each switch, crash or restore of the database. Times are of the clock of the server after it. written_again: ends that the server had lost and workers remembered; claimed_again: runs that went on and whose claim was lost; put_back: jobs whose enqueue was lost; recovered: runs of workers that did not come back; rerun: given back because their effects were lost; stopped: handlers whose job had gone on elsewhere; set_aside: made dead letters by resume_cluster; ran_twice: completed by a worker that had lost its lease, as one has that reached only an older primary, and run by another.';

CREATE OR REPLACE VIEW switch_jobs AS
  SELECT w.epoch_no, w.job_id, w.run, w.what, w.worker AS worker_id, j.job_type, a.status
  FROM (SELECT w.epoch_no, w.job_id, w.run, w.what, w.worker FROM switch_job w
    UNION ALL SELECT t.epoch_no, t.job_id, t.run, 'ran_twice', t.worker FROM ran_twice t) w
  LEFT JOIN job j ON j.id = w.job_id LEFT JOIN jobs_all a ON a.id = w.job_id;
COMMENT ON VIEW switch_jobs IS 'What became of single jobs in each switch, with their present status.';

SELECT grant_roles();
