-- breaking: yes
-- The tables. The state of a job is the table that it stands in: at each commit a job that has not been removed stands in
-- exactly one of ready, later, blocked, lease, outcome. A change of state deletes one entry under its lock and inserts one.
--
-- Each migration runs with search_path = the schema of the installation, so no name here is qualified, and functions keep that
-- path (SET search_path FROM CURRENT): the schema can have any name, and nothing of another schema is ever found.
--
-- Bits of `flags` in every state row spare the hot statements a look at tables that nearly never have a row for the job:
--   1  the job has a unique key (a row in key_owner while it lives)
--   2  its entry in ready has a row in requeued (only meaningful in ready)
--   4  a person edited its data (a row in edit)
--   8  its insert into ready asks for a wake-up (only meaningful in ready)
--  16  it came with an id of its own, or was retried, while workers re-attached (only meaningful in ready, and in that window)

-- gen_random_uuid() is part of PostgreSQL from version 13 on.
DO $$
BEGIN
  IF to_regprocedure('pg_catalog.gen_random_uuid()') IS NOT NULL THEN
    CREATE FUNCTION random_uuid() RETURNS uuid LANGUAGE sql VOLATILE AS 'SELECT pg_catalog.gen_random_uuid()';
  ELSE
    CREATE FUNCTION random_uuid() RETURNS uuid LANGUAGE sql VOLATILE AS
      'SELECT overlay(overlay(pg_catalog.md5(pg_catalog.concat(pg_catalog.random(), pg_catalog.clock_timestamp(), pg_catalog.random()))
         PLACING ''4'' FROM 13) PLACING ''8'' FROM 17)::uuid';
  END IF;
END $$;
COMMENT ON FUNCTION random_uuid() IS 'A random UUID (version 4): tokens, epochs, ids of workers.';

-- The defaults are bound here and now and the body names pg_catalog, so it needs no search_path and can be inlined.
CREATE FUNCTION uuid_v7(p_random uuid DEFAULT random_uuid(), p_at timestamptz DEFAULT clock_timestamp()) RETURNS uuid LANGUAGE sql VOLATILE AS $$
  -- The first 48 bits of a version 4 become the milliseconds since 1970; bits 52 and 53 turn its version 4 into 7.
  SELECT pg_catalog.encode(pg_catalog.set_bit(pg_catalog.set_bit(
    overlay(pg_catalog.uuid_send(p_random)
      PLACING substring(pg_catalog.int8send((extract(epoch FROM p_at) OPERATOR(pg_catalog.*) 1000)::bigint) FROM 3) FROM 1 FOR 6),
    52, 1), 53, 1), 'hex')::uuid
$$;
COMMENT ON FUNCTION uuid_v7(uuid, timestamptz) IS 'A new UUIDv7 (RFC 9562): sorts by the millisecond in which it was made.';

-- One row for each (shard, job type) that ever had a job. Claims name lanes, so they never walk over rows they may not take.
CREATE TABLE lane (
  lane int GENERATED ALWAYS AS IDENTITY PRIMARY KEY,
  shard text NOT NULL DEFAULT 'default',
  job_type text NOT NULL,
  paused_at timestamptz,
  paused_by text,
  UNIQUE (job_type, shard)
);

-- What was asked for. Never updated.
CREATE TABLE job (
  id uuid PRIMARY KEY,
  created_at timestamptz NOT NULL,
  lane int NOT NULL,
  priority int NOT NULL,
  pos bigint,                       -- its place in ready when it went there at once; else NULL (see requeued)
  run_at timestamptz NOT NULL,
  max_attempts int,                 -- NULL: as the handler's policy says
  timeout interval,                 -- NULL: as the handler says
  job_type text NOT NULL,
  tenant text NOT NULL,
  unique_key text,
  data jsonb NOT NULL,
  labels jsonb NOT NULL,
  options jsonb NOT NULL
);

CREATE SEQUENCE ready_pos AS bigint CACHE 1;

-- The jobs that can run now, in the order of claims. No second index: it would cost a fifth of the enqueue rate and more of the drain rate.
CREATE TABLE ready (
  lane int NOT NULL,
  priority int NOT NULL,
  pos bigint NOT NULL,
  id uuid NOT NULL,
  run int NOT NULL,
  attempts int NOT NULL,
  flags smallint NOT NULL,
  ready_at timestamptz NOT NULL,
  PRIMARY KEY (lane, priority, pos)
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- Where in ready a job stands that did not go there at its enqueue.
CREATE TABLE requeued (
  id uuid PRIMARY KEY,
  lane int NOT NULL,
  priority int NOT NULL,
  pos bigint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);

-- Jobs whose time has not come.
CREATE TABLE later (
  id uuid PRIMARY KEY,
  due timestamptz NOT NULL,
  waits_for text NOT NULL CHECK (waits_for IN ('time', 'retry', 'snooze', 'window')),
  lane int NOT NULL,
  priority int NOT NULL,
  run int NOT NULL,
  attempts int NOT NULL,
  flags smallint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX later_due ON later (due);

-- Jobs that wait for other jobs.
CREATE TABLE blocked (
  id uuid PRIMARY KEY,
  lane int NOT NULL,
  priority int NOT NULL,
  run int NOT NULL,
  attempts int NOT NULL,
  flags smallint NOT NULL
);
CREATE TABLE job_dependencies (
  job_id uuid NOT NULL,
  depends_on_job_id uuid NOT NULL,
  created_at timestamptz NOT NULL DEFAULT now(),
  PRIMARY KEY (job_id, depends_on_job_id)
);

-- The running jobs.
CREATE TABLE lease (
  id uuid PRIMARY KEY,
  token uuid NOT NULL,
  worker uuid NOT NULL,
  call bigint NOT NULL,             -- the worker's number of the claim that took it
  epoch_no bigint NOT NULL,         -- the epoch of the claim
  run int NOT NULL,
  attempts int NOT NULL,            -- with this one
  max_attempts int NOT NULL,        -- recovery decides by it, without the handler's configuration
  lane int NOT NULL,
  priority int NOT NULL,
  until timestamptz,                -- NULL: as long as the worker's
  started_at timestamptz NOT NULL,
  flags smallint NOT NULL
) WITH (autovacuum_vacuum_scale_factor = 0.02, autovacuum_vacuum_threshold = 2000, autovacuum_vacuum_cost_delay = 0);
CREATE INDEX lease_worker ON lease (worker, call);

-- How a job ended. Never updated: whoever reopens the job copies the row to attempt and deletes it first.
CREATE TABLE outcome (
  id uuid PRIMARY KEY,
  status text NOT NULL CHECK (status IN ('completed', 'failed', 'discarded', 'cancelled')),
  run int NOT NULL,
  attempts int NOT NULL,
  token uuid,                       -- of the run that ended it; NULL: a person did
  worker uuid,
  epoch_no bigint NOT NULL,         -- the epoch of the end
  lane int NOT NULL,
  flags smallint NOT NULL,
  started_at timestamptz,
  finished_at timestamptz NOT NULL,
  exit_code int,
  http_status int,
  result jsonb,
  error text,
  log_tail text
);

-- One row for each attempt that ended without ending the job, and one for what was said of it too late to count.
CREATE TABLE attempt (
  job_id uuid NOT NULL,
  run int NOT NULL,
  token uuid NOT NULL,
  attempt int,
  worker uuid,
  started_at timestamptz,
  finished_at timestamptz NOT NULL,
  outcome text NOT NULL,
  applied boolean NOT NULL,         -- false: history only, it changed nothing
  exit_code int,
  http_status int,
  result jsonb,
  error text,
  log_tail text,
  PRIMARY KEY (job_id, run, token, applied)
);

-- Who owns a unique key: the one live job of (job type, tenant, key).
CREATE TABLE key_owner (
  job_type text NOT NULL,
  tenant text NOT NULL,
  key text NOT NULL,
  id uuid NOT NULL,
  PRIMARY KEY (job_type, tenant, key)
);

-- Data that a person put in place of the job's own.
CREATE TABLE edit (
  id uuid PRIMARY KEY,
  data jsonb NOT NULL,
  edited_by text NOT NULL,
  edited_at timestamptz NOT NULL
);

-- What a person asked of a running job. Whoever ends the run carries it out, or the sweep when nobody does.
CREATE TABLE stop_request (
  id uuid PRIMARY KEY,
  kind text NOT NULL CHECK (kind IN ('cancel', 'complete', 'dead')),
  reason text,
  requested_by text NOT NULL,
  requested_at timestamptz NOT NULL
);

-- One row for each death of a job. Its id is the token of the run that died.
CREATE TABLE dead_letter (
  id uuid PRIMARY KEY,
  job_id uuid NOT NULL,
  lane int NOT NULL,
  run int NOT NULL,
  attempts int NOT NULL,
  last_error text,
  failed_at timestamptz NOT NULL,
  reviewed_by text,
  reviewed_at timestamptz,
  review_action text CHECK (review_action IN ('retry', 'discard', 'fixed')),
  review_note text
);
CREATE INDEX dead_letter_open ON dead_letter (lane, failed_at) WHERE reviewed_at IS NULL;
CREATE INDEX dead_letter_job ON dead_letter (job_id);

-- A worker is one running daemon. Rarely written, since claims read it; what changes at each heartbeat is apart, in beat.
CREATE TABLE worker (
  id uuid PRIMARY KEY,
  name text NOT NULL,
  version text NOT NULL,
  status text NOT NULL CHECK (status IN ('live', 'draining', 'stopped', 'lost')),
  lease_ttl interval NOT NULL,
  heartbeat interval NOT NULL,
  job_types text[] NOT NULL,        -- patterns; * stands for any characters
  concurrency int NOT NULL,
  admitted boolean NOT NULL,        -- may claim: all others know of it
  drain_requested boolean NOT NULL DEFAULT false,
  started_at timestamptz NOT NULL,
  ended_at timestamptz
);
CREATE TABLE beat (
  worker uuid PRIMARY KEY,
  beat bigint NOT NULL,
  beat_at timestamptz NOT NULL,
  settled bigint NOT NULL,          -- claim calls up to this one have been answered or given up
  in_flight int NOT NULL,
  told boolean NOT NULL,            -- nobody came since a heartbeat told it who the others are
  stats jsonb NOT NULL              -- lane -> [ended lately, seconds they took together]
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- Jobs that were taken from a worker by a better claim; its heartbeats tell it.
CREATE TABLE revocation (
  worker uuid NOT NULL,
  job_id uuid NOT NULL,
  token uuid NOT NULL,
  reason text NOT NULL,
  revoked_at timestamptz NOT NULL,
  PRIMARY KEY (worker, job_id, token)
);

-- Workers that wait for a notification, and for which lanes. UNLOGGED: a hint that may be lost, since polling never stops.
CREATE UNLOGGED TABLE sleeper (
  worker uuid PRIMARY KEY,
  lanes int[] NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- The epoch, and what claims may take. `here` is UNLOGGED: a crash, a promotion or a restore empties it, and then nothing is
-- claimed until a worker has opened a new epoch. No function that asks for WAL positions or timelines stands in a claim.
CREATE TABLE cluster (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  installation uuid NOT NULL,
  epoch uuid NOT NULL,
  epoch_no bigint NOT NULL,
  gate text NOT NULL CHECK (gate IN ('open', 'window', 'hold')),
  mark bigint NOT NULL,             -- in a window: only ready rows beyond this position may be claimed
  opened_at timestamptz NOT NULL
);
CREATE UNLOGGED TABLE here (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  epoch uuid NOT NULL
);
-- In a window: the workers that are waited for.
CREATE TABLE expected (
  worker uuid PRIMARY KEY,
  lease_ttl interval NOT NULL,
  spoken_at timestamptz
);
-- The clock of recovery.
CREATE TABLE sweep (
  one boolean PRIMARY KEY DEFAULT true CHECK (one),
  swept_at timestamptz NOT NULL
) WITH (fillfactor = 50, autovacuum_vacuum_scale_factor = 0, autovacuum_vacuum_threshold = 200);

-- How a run ended, as a worker says it. kind: completed | failed | released | snoozed, and for ends that no worker says: ghost | lost.
CREATE TYPE run_end AS (
  kind text, job uuid, run int, token uuid, delay_ms bigint, final boolean, exit_code int, http_status int,
  result jsonb, error text, log_tail text, enqueue jsonb
);

-- Which tenants a producer role may use and see; '*' is all. A role without a row has the tenant 'default'.
CREATE TABLE tenant_grant (
  role_name text NOT NULL,
  tenant text NOT NULL,
  PRIMARY KEY (role_name, tenant)
);

INSERT INTO cluster (installation, epoch, epoch_no, gate, mark, opened_at)
  VALUES (random_uuid(), random_uuid(), 1, 'open', 0, clock_timestamp());
INSERT INTO here (epoch) SELECT epoch FROM cluster;
INSERT INTO sweep (swept_at) VALUES (clock_timestamp());
