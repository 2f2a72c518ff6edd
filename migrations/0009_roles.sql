-- breaking: yes
-- Who may do what. Roles belong to the whole server; where the migrating role may not create them, an administrator creates them
-- and calls grant_roles().

CREATE FUNCTION grant_roles() RETURNS text[] LANGUAGE plpgsql AS $$
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
    EXECUTE format('GRANT SELECT ON queue_metrics, workers TO %I', v_role);
    -- Functions of a view run with the rights of whoever reads it.
    EXECUTE format('GRANT EXECUTE ON FUNCTION obstacle(int), last_error_of(uuid), tenants_of(name) TO %I', v_role);
    CONTINUE WHEN v_role = 'tenure_monitor';
    -- UPDATE and DELETE too, since what refuses them says which function to use.
    EXECUTE format('GRANT SELECT, INSERT, UPDATE, DELETE ON jobs TO %I', v_role);
    SELECT string_agg(p.oid::regprocedure::text, ', ') INTO v_functions FROM pg_proc p
      WHERE p.pronamespace = quote_ident(v_schema)::regnamespace AND (
        p.proname IN ('enqueue', 'enqueue_many', 'uuid_v7', 'random_uuid', 'all_deps_completed', 'assert_lease')
        OR v_role IN ('tenure_worker', 'tenure_admin') AND p.proname IN ('open_epoch', 'register_worker', 'heartbeat', 'claim_job_batch', 'settle_marks', 'lanes',
          'set_sleeping', 'finish', 'complete', 'fail', 'release', 'snooze', 'hold', 'reattach', 'sweep', 'promote', 'deregister_worker', 'worker_channel')
        OR v_role = 'tenure_admin' AND p.proname IN ('cancel', 'retry', 'review_dead_letter', 'complete_manually', 'move_to_dead_letter', 'pause', 'resume', 'drain_worker'));
    EXECUTE format('GRANT EXECUTE ON FUNCTION %s TO %I', v_functions, v_role);
    CONTINUE WHEN v_role = 'tenure_producer';
    EXECUTE format('GRANT SELECT ON ALL TABLES IN SCHEMA %I TO %I', v_schema, v_role);
    IF v_role = 'tenure_admin' THEN
      EXECUTE format('GRANT INSERT, DELETE ON tenant_grant TO %I', v_role);
    END IF;
  END LOOP;
  RETURN v_missing;
END $$ SET search_path FROM CURRENT;
COMMENT ON FUNCTION grant_roles() IS 'Grants the roles tenure_producer, tenure_worker, tenure_monitor and tenure_admin what they need; returns those that do not exist. May be called again at any time.';

DO $$
DECLARE
  v_role text;
BEGIN
  FOREACH v_role IN ARRAY '{tenure_producer,tenure_worker,tenure_monitor,tenure_admin}'::text[] LOOP
    IF NOT EXISTS (SELECT FROM pg_roles p WHERE p.rolname = v_role) THEN
      BEGIN
        EXECUTE format('CREATE ROLE %I NOLOGIN', v_role);
      EXCEPTION
        WHEN insufficient_privilege THEN
          RAISE WARNING 'tenure: this role may not create the role %; an administrator can, and then call grant_roles()', v_role;
        WHEN duplicate_object OR unique_violation THEN NULL;  -- another installation made it at the same moment
      END;
    END IF;
  END LOOP;
  PERFORM grant_roles();
END $$;
