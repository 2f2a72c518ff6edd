//! The SQL functions on a real server, with a clock that the test moves.
//!
//! The functions find `now()` and `clock_timestamp()` by their search_path, which each of them takes over from the session that
//! creates it. Here that path has a schema's own two functions before PostgreSQL's, and these read a setting of the session. So
//! nothing sleeps, every deadline is met to the millisecond, and a slow machine changes nothing.

use std::fs::Permissions;
use std::os::unix::fs::{MetadataExt, PermissionsExt, chown};

use tempfile::TempDir;
use tenure_embedded::{Options, Row, Server, Sql};
use tenure_store::migrate::MIGRATIONS;

const CLOCK: &str = "CREATE SCHEMA tenure; SET search_path = tenure, pg_catalog, pg_temp;
CREATE FUNCTION clock_timestamp() RETURNS timestamptz LANGUAGE sql STABLE AS
  $$ SELECT pg_catalog.to_timestamp(pg_catalog.current_setting('model.now')::bigint / 1000.0) $$;
CREATE FUNCTION now() RETURNS timestamptz LANGUAGE sql STABLE AS
  $$ SELECT pg_catalog.to_timestamp(pg_catalog.current_setting('model.now')::bigint / 1000.0) $$;";

pub(crate) struct Postgres {
    // Dropped before the folder that it has files in.
    server: Server,
    /// Where copies are made; `None`: with the rest, which takes ten times as long.
    memory: Option<TempDir>,
    sql: Option<Sql>,
    database: String,
    copies: u32,
    now: i64,
}

impl Postgres {
    pub(crate) fn start(now: i64) -> Self {
        let settings = [
            ("autovacuum", "off"),
            ("jit", "off"),
            ("shared_buffers", "64MB"),
        ];
        let settings = settings
            .map(|(key, value)| (key.to_owned(), value.to_owned()))
            .to_vec();
        let server = Server::start(Options {
            settings,
            ..Options::for_tests()
        })
        .unwrap();
        let memory = folder_in_memory(&server);
        let mut admin = server.sql("postgres").unwrap();
        if let Some(folder) = &memory {
            let place = folder.path().display();
            admin
                .run(&format!("CREATE TABLESPACE memory LOCATION '{place}'"))
                .unwrap();
        }
        let tablespace = if memory.is_some() {
            "TABLESPACE memory"
        } else {
            ""
        };
        admin
            .run(&format!("CREATE DATABASE empty {tablespace}"))
            .unwrap();
        let mut sql = server.sql("empty").unwrap();
        sql.run(&format!("SET model.now = {now}; {CLOCK}")).unwrap();
        for migration in MIGRATIONS {
            sql.run(migration.sql)
                .unwrap_or_else(|error| panic!("{}: {error}", migration.name));
        }
        sql.run(super::state::MS).unwrap();
        drop(sql);
        let mut this = Self {
            server,
            memory,
            sql: None,
            database: String::new(),
            copies: 0,
            now,
        };
        this.begin("empty");
        this
    }

    /// A new database, made from `template`, and a session in it.
    pub(crate) fn begin(&mut self, template: &str) {
        let old = std::mem::take(&mut self.database);
        self.database = self.copy_of(template);
        self.connect();
        self.drop(&old);
    }

    /// A copy of the present database, as a standby that falls behind from now on.
    pub(crate) fn copy(&mut self) -> String {
        // No session may be open in a database that is copied.
        self.sql = None;
        let copy = self.copy_of(&self.database.clone());
        self.connect();
        copy
    }

    fn copy_of(&mut self, template: &str) -> String {
        self.sql = None;
        self.copies += 1;
        let name = format!("copy{}", self.copies);
        let tablespace = if self.memory.is_some() {
            "TABLESPACE memory"
        } else {
            ""
        };
        // From version 15 on there is a choice, and the default writes all of it to the WAL.
        let major = self
            .server
            .version()
            .split('.')
            .next()
            .and_then(|it| it.parse().ok());
        let strategy = if major >= Some(15) {
            "STRATEGY file_copy"
        } else {
            ""
        };
        self.admin(&format!(
            "CREATE DATABASE {name} TEMPLATE {template} {tablespace} {strategy}"
        ));
        name
    }

    /// The copy becomes the primary. Its `here` is empty, as after every promotion.
    pub(crate) fn fall_back_to(&mut self, copy: &str) {
        self.sql = None;
        let old = std::mem::replace(&mut self.database, copy.to_owned());
        self.drop(&old);
        self.connect();
        self.must("DELETE FROM here");
    }

    /// It looks as if it had been copied from another system.
    pub(crate) fn move_to_other_system(&mut self) {
        self.must("UPDATE cluster SET system_id = system_id + 1");
    }

    pub(crate) fn drop(&mut self, database: &str) {
        if !database.is_empty() {
            self.admin(&format!("DROP DATABASE {database}"));
        }
    }

    fn admin(&self, statement: &str) {
        self.server.sql("postgres").unwrap().run(statement).unwrap();
    }

    fn connect(&mut self) {
        let mut sql = self.server.sql(&self.database).unwrap();
        let session = "SET search_path = tenure, pg_catalog; SET synchronous_commit = off; SET client_min_messages = error";
        sql.run(&format!("{session}; SET model.now = {}", self.now))
            .unwrap();
        sql.run(&format!("PREPARE state AS {}", super::state::OF_DATABASE))
            .unwrap();
        self.sql = Some(sql);
    }

    /// The rows, or the SQLSTATE.
    pub(crate) fn run(&mut self, now: i64, statement: &str) -> Result<Vec<Row>, String> {
        if self.now != now {
            self.now = now;
            self.must(&format!("SET model.now = {now}"));
        }
        let sql = self.sql.as_mut().expect("a session is open");
        sql.run(statement).map_err(|error| match error.code() {
            Some(code) if code.starts_with("TN") => code.to_owned(),
            _ => error.to_string(),
        })
    }

    pub(crate) fn must(&mut self, statement: &str) {
        let sql = self.sql.as_mut().expect("a session is open");
        sql.run(statement)
            .unwrap_or_else(|error| panic!("{statement}: {error}"));
    }

    /// Empties the database between two histories, without the cost of a new one.
    pub(crate) fn clear(&mut self, now: i64) {
        self.now = now;
        self.must(&format!(
            "SET model.now = {now}; DELETE FROM job; DELETE FROM watermark; DELETE FROM ready; DELETE FROM requeued; DELETE FROM later; DELETE FROM lease; DELETE FROM outcome; \
             DELETE FROM attempt; DELETE FROM key_owner; DELETE FROM edit; DELETE FROM stop_request; DELETE FROM dead_letter; DELETE FROM worker; DELETE FROM beat; \
             DELETE FROM revocation; DELETE FROM expected; DELETE FROM here; DELETE FROM lane; DELETE FROM switch; DELETE FROM switch_job; DELETE FROM effect; \
             UPDATE cluster c SET epoch_no = 1, gate = 'open', mark = 0, opened_at = clock_timestamp(), unaccepted = false, uncovered = false, \
               system_id = f.system_id, timeline = f.timeline FROM server_facts() f; UPDATE sweep SET swept_at = clock_timestamp(); \
             INSERT INTO here (epoch) SELECT epoch FROM cluster"
        ));
    }
}

/// An empty folder of the server's user in memory, where a database is copied fast.
fn folder_in_memory(server: &Server) -> Option<TempDir> {
    let mut builder = tempfile::Builder::new();
    let folder = builder
        .permissions(Permissions::from_mode(0o700))
        .tempdir_in("/dev/shm")
        .ok()?;
    let owner = server.data_dir().metadata().ok()?;
    chown(folder.path(), Some(owner.uid()), Some(owner.gid())).ok()?;
    Some(folder)
}
