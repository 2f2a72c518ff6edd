-- The limit for enqueue: what tenure.enqueue_many writes for 200 jobs, as bare statements.
WITH new AS (
  INSERT INTO tenure_bench.job (id, created_at, lane, priority, pos, run_at, job_type, tenant, data, labels, options)
  SELECT tenure_bench.uuid_v7(), now(), 1, 0, nextval('tenure_bench.ready_pos'), now(), 'noop', 'default', e, '{}', '{}'
  FROM jsonb_array_elements((SELECT jsonb_agg(d) FROM (SELECT jsonb_build_object('pad', repeat('x', 120)) AS d FROM generate_series(1, 200)) x)) e
  RETURNING id, lane, priority, pos
)
INSERT INTO tenure_bench.ready (lane, priority, pos, id, run, attempts, flags, ready_at)
SELECT lane, priority, pos, id, 0, 0, 0, now() FROM new;
