-- The limit for drain: what a claim and its completions write for 200 jobs, as bare statements in two transactions. Each client
-- remembers the last position that it took (\aset), as a worker does: without it the claims walk over the rows taken before.
\set call random(1, 1000000000000)
WITH head AS (
  SELECT r.ctid AS place FROM tenure_bench.ready r
  WHERE r.lane = 1 AND r.priority = 0 AND r.pos > :mark ORDER BY r.pos LIMIT 200 FOR UPDATE SKIP LOCKED
), taken AS (
  DELETE FROM tenure_bench.ready r WHERE r.ctid = ANY (ARRAY(SELECT place FROM head)) RETURNING r.*
), leased AS (
  INSERT INTO tenure_bench.lease (id, token, worker, call, epoch_no, run, attempts, max_attempts, lane, priority, started_at, flags)
  SELECT id, tenure_bench.random_uuid(), '00000000-0000-4000-8000-000000000001', :call, 1, run + 1, attempts + 1, 5, lane, priority, now(), 0 FROM taken
)
SELECT t.id, t.run, j.job_type, j.tenant, j.created_at, j.run_at, j.data, j.labels, j.options, t.pos AS mark
FROM taken t JOIN tenure_bench.job j ON j.id = t.id ORDER BY t.pos \aset
WITH gone AS (
  DELETE FROM tenure_bench.lease WHERE worker = '00000000-0000-4000-8000-000000000001' AND call = :call RETURNING *
)
INSERT INTO tenure_bench.outcome (id, status, run, attempts, token, worker, epoch_no, lane, flags, started_at, finished_at)
SELECT id, 'completed', run, attempts, token, worker, 1, lane, 0, started_at, now() FROM gone;
