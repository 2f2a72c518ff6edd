-- breaking: no
-- Many jobs at once, for programs that bring them by COPY into a table of their own.

CREATE FUNCTION enqueue_jobs(jobs new_job[], options jsonb DEFAULT '{}') RETURNS bigint LANGUAGE plpgsql SECURITY DEFINER AS $$
DECLARE
  v_ids uuid[];
BEGIN
  PERFORM make_durable(options ->> 'durability');
  IF jobs IS NULL THEN RETURN 0; END IF;
  v_ids := put_jobs(durable_jobs(jobs));
  -- What this transaction has put in bears its time.
  RETURN (SELECT count(*) FROM job j WHERE j.id = ANY (v_ids) AND j.created_at = now());
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION enqueue_jobs(new_job[], jsonb) IS
  'Puts many jobs in: an array of rows with the parameters of enqueue, in that order. Returns how many of them are new: not those whose id is known or whose unique_key a live job owns. One bad job refuses all. options: durability, for all of them.';

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
        p.proname IN ('enqueue', 'enqueue_many', 'enqueue_jobs', 'uuid_v7', 'random_uuid', 'all_deps_completed', 'assert_lease')
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
