//! A server with a migrated database to copy, connections that say which statement failed, a worker in SQL, and the invariant.

use std::thread;
use std::time::Duration;

use tenure_embedded::{Options, Server, Sql};
use tenure_store::address::Address;
use tenure_store::migrate::Migrator;
use tenure_store::session::{Session, Target};

/// How long a state may take to come about on a slow machine.
const PATIENCE: Duration = Duration::from_secs(30);

/// One server; each case has a database of its own.
pub(crate) struct Lab {
    pub(crate) server: Server,
}

impl Lab {
    /// Starts a server and migrates the database that the others are copied from.
    pub(crate) fn start() -> Self {
        let lab = Self::start_empty();
        lab.server.create_database("migrated").unwrap();
        lab.migrate("migrated", "postgres", "tenure").unwrap();
        lab
    }

    /// Starts a server without any database of ours. Deadlocks are found soon, and logged.
    pub(crate) fn start_empty() -> Self {
        let settings = [
            ("deadlock_timeout", "200ms"),
            ("max_prepared_transactions", "5"),
        ];
        let options = Options {
            settings: settings
                .map(|(key, value)| (key.to_owned(), value.to_owned()))
                .to_vec(),
            ..Options::for_tests()
        };
        Self {
            server: Server::start(options).unwrap(),
        }
    }

    /// Migrates as `tenure migrate up` does.
    pub(crate) fn migrate(
        &self,
        database: &str,
        user: &str,
        schema: &str,
    ) -> Result<Vec<String>, tenure_store::migrate::MigrateError> {
        block_on(async {
            let (session, _notifications) = Session::open(&self.target(database, user, schema))
                .await
                .unwrap();
            Migrator::new(&session, schema).up().await
        })
    }

    pub(crate) fn target(&self, database: &str, user: &str, schema: &str) -> Target {
        let url = self.server.url(database, user);
        Target {
            address: Address::parse(&url, None, Duration::from_secs(10)).unwrap(),
            schema: schema.to_owned(),
            connect_timeout: Duration::from_secs(10),
            statement_timeout: Duration::from_secs(30),
            pooled: false,
        }
    }

    /// The migrated database as it is when it is new. `CREATE DATABASE … TEMPLATE` would take a hundred times as long.
    pub(crate) fn db(&self, name: &'static str) -> Db<'_> {
        let db = Db {
            lab: self,
            name: "migrated".to_owned(),
            case: name,
        };
        db.connect().run(CLEAR);
        db
    }

    /// A database that exists.
    pub(crate) fn reopen(&self, name: &str) -> Db<'_> {
        Db {
            lab: self,
            name: name.to_owned(),
            case: "",
        }
    }

    /// The lines of the server's log that speak of deadlocks.
    pub(crate) fn deadlocks(&self) -> Vec<String> {
        let log = std::fs::read_to_string(self.server.log_file()).unwrap();
        log.lines()
            .filter(|line| line.contains("deadlock detected"))
            .map(str::to_owned)
            .collect()
    }
}

/// Runs what needs tokio.
pub(crate) fn block_on<T>(work: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(work)
}

pub(crate) struct Db<'l> {
    lab: &'l Lab,
    pub(crate) name: String,
    case: &'static str,
}

const CLEAR: &str = "
  DO $$ DECLARE t text; BEGIN
    FOR t IN SELECT c.oid::regclass FROM pg_class c WHERE relnamespace = 'tenure'::regnamespace AND relkind = 'r'
      AND relname NOT IN ('migration', 'cluster', 'sweep') LOOP EXECUTE 'DELETE FROM ' || t; END LOOP;
  END $$;
  ALTER SEQUENCE ready_pos RESTART;
  ALTER TABLE lane ALTER lane RESTART;
  UPDATE cluster c SET epoch = random_uuid(), epoch_no = 1, gate = 'open', mark = 0, opened_at = clock_timestamp(), unaccepted = false,
    uncovered = false, system_id = f.system_id, timeline = f.timeline FROM server_facts() f;
  INSERT INTO here (epoch) SELECT epoch FROM cluster;
  UPDATE sweep SET swept_at = clock_timestamp()";

impl Db<'_> {
    /// A connection whose search_path is the schema, so that statements in tests are short.
    pub(crate) fn connect(&self) -> Conn {
        let mut conn = self.connect_as("postgres");
        conn.run("SET search_path = tenure; SET statement_timeout = '30s'");
        conn
    }

    /// A connection of another role, with the default search_path.
    pub(crate) fn connect_as(&self, user: &str) -> Conn {
        Conn::over(Sql::connect(self.lab.server.port(), &self.name, user).unwrap())
    }

    /// Asserts the invariant of DESIGN §6 and what goes with it.
    pub(crate) fn sound(&self) {
        let broken = self.connect().list(BROKEN);
        assert!(broken.is_empty(), "{}: {broken:#?}", self.case);
    }
}

/// Each job stands in exactly one place, each place has a job, requeued and keys fit, nothing belongs to what has ended.
const BROKEN: &str = "
  WITH place AS (
    SELECT id, 'ready' AS place, run, flags FROM ready UNION ALL SELECT id, 'later', run, flags FROM later
    UNION ALL SELECT id, 'blocked', run, flags FROM blocked UNION ALL SELECT id, 'lease', run, flags FROM lease
    UNION ALL SELECT id, 'outcome', run, flags FROM outcome)
  SELECT 'job in ' || count(p.id) || ' places', j.id, string_agg(p.place, ',') FROM job j LEFT JOIN place p USING (id) GROUP BY j.id HAVING count(p.id) <> 1
  UNION ALL SELECT 'no job row', p.id, p.place FROM place p WHERE NOT EXISTS (SELECT FROM job j WHERE j.id = p.id)
  UNION ALL SELECT 'ready row cannot be found by id', r.id, NULL FROM ready r JOIN job j USING (id)
    LEFT JOIN requeued q ON (q.id, q.lane, q.priority, q.pos) = (r.id, r.lane, r.priority, r.pos)
    WHERE CASE WHEN r.flags & 2 <> 0 THEN q.id IS NULL ELSE (r.lane, r.priority, r.pos) IS DISTINCT FROM (j.lane, j.priority, j.pos) END
  UNION ALL SELECT 'requeued without ready', q.id, NULL FROM requeued q LEFT JOIN ready r USING (id, lane, priority, pos) WHERE r.id IS NULL OR r.flags & 2 = 0
  UNION ALL SELECT 'live keyed job without its key', p.id, j.unique_key FROM place p JOIN job j USING (id)
    LEFT JOIN key_owner k ON (k.job_type, k.tenant, k.key, k.id) = (j.job_type, j.tenant, j.unique_key, j.id)
    WHERE p.place <> 'outcome' AND p.flags & 1 <> 0 AND k.id IS NULL
  UNION ALL SELECT 'key of no live job', k.id, k.key FROM key_owner k
    WHERE NOT EXISTS (SELECT FROM place p JOIN job j USING (id) WHERE p.id = k.id AND p.place <> 'outcome' AND p.flags & 1 <> 0
      AND (j.job_type, j.tenant, j.unique_key) = (k.job_type, k.tenant, k.key))
  UNION ALL SELECT 'open dead letter of a job that has not failed', d.job_id, p.place FROM dead_letter d JOIN place p ON p.id = d.job_id
    WHERE d.reviewed_at IS NULL AND p.place <> 'outcome'
  UNION ALL SELECT 'failed job without one open dead letter', o.id, NULL FROM outcome o WHERE o.status = 'failed'
    AND (SELECT count(*) FROM dead_letter d WHERE d.job_id = o.id AND d.reviewed_at IS NULL) <> 1
  UNION ALL SELECT 'the view shows it ' || count(v.id) || ' times', j.id, NULL FROM job j LEFT JOIN jobs v USING (id) GROUP BY j.id HAVING count(v.id) <> 1";

/// A connection. A statement that fails where it should not is a failure of the test that names it.
pub(crate) struct Conn {
    sql: Sql,
}

/// What the server said against a statement.
#[derive(Debug)]
pub(crate) struct Refusal {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) hint: String,
}

impl Conn {
    pub(crate) fn over(sql: Sql) -> Self {
        Self { sql }
    }

    pub(crate) fn run(&mut self, sql: &str) {
        self.list(sql);
    }

    /// One text for each row, its values joined by `|`; NULL is `~`.
    pub(crate) fn list(&mut self, sql: &str) -> Vec<String> {
        self.try_list(sql)
            .unwrap_or_else(|refusal| panic!("{refusal:?} from {sql}"))
    }

    /// The only row.
    pub(crate) fn one(&mut self, sql: &str) -> String {
        let mut rows = self.list(sql);
        assert_eq!(rows.len(), 1, "{rows:?} from {sql}");
        rows.remove(0)
    }

    pub(crate) fn try_list(&mut self, sql: &str) -> Result<Vec<String>, Refusal> {
        let text = |value: Option<String>| value.unwrap_or_else(|| "~".to_owned());
        match self.sql.run(sql) {
            Ok(rows) => Ok(rows
                .into_iter()
                .map(|row| row.into_iter().map(text).collect::<Vec<_>>().join("|"))
                .collect()),
            Err(tenure_embedded::SqlError::Refused {
                code,
                message,
                hint,
            }) => Err(Refusal {
                code,
                message,
                hint: hint.unwrap_or_default(),
            }),
            Err(other) => panic!("{other:?} from {sql}"),
        }
    }

    /// What the server says against a statement that must fail.
    pub(crate) fn refusal(&mut self, sql: &str) -> Refusal {
        match self.try_list(sql) {
            Err(refusal) => refusal,
            Ok(rows) => panic!("{rows:?} instead of a refusal from {sql}"),
        }
    }

    /// Its SQLSTATE.
    pub(crate) fn code(&mut self, sql: &str) -> String {
        self.refusal(sql).code
    }

    pub(crate) fn pid(&mut self) -> String {
        self.one("SELECT pg_backend_pid()")
    }

    /// Waits until the query gives `value`.
    pub(crate) fn wait_for(&mut self, sql: &str, value: &str) {
        let step = Duration::from_millis(10);
        for _ in 0..PATIENCE.as_millis() / step.as_millis() {
            if self.list(sql) == [value] {
                return;
            }
            thread::sleep(step);
        }
        panic!(
            "{:?} and not {value} after {PATIENCE:?} from {sql}",
            self.list(sql)
        );
    }

    /// Waits until that backend waits for a lock.
    pub(crate) fn wait_until_blocked(&mut self, pid: &str) {
        self.wait_for(
            &format!("SELECT wait_event_type FROM pg_stat_activity WHERE pid = {pid}"),
            "Lock",
        );
    }

    /// Puts a job in; `more` are further named arguments.
    pub(crate) fn enqueue(&mut self, job_type: &str, more: &str) -> String {
        let comma = if more.is_empty() { "" } else { ", " };
        self.one(&format!("SELECT enqueue('{job_type}'{comma}{more})"))
    }

    /// Status, attempts and what it waits for.
    pub(crate) fn state(&mut self, job: &str) -> String {
        self.one(&format!(
            "SELECT status || '/' || attempts FROM jobs WHERE id = '{job}'"
        ))
    }

    /// How a copy on another system looks.
    pub(crate) fn move_to_other_system(&mut self) {
        self.run("UPDATE cluster SET system_id = system_id + 1");
    }

    /// What a crash or promotion does to the epoch.
    pub(crate) fn lose_here(&mut self) {
        self.run("DELETE FROM here");
    }
}

/// A worker, as a program of a user's own would be one.
#[derive(Debug, Clone)]
pub(crate) struct Worker {
    pub(crate) id: String,
    pub(crate) epoch: String,
    pub(crate) call: i64,
    pub(crate) beat: i64,
}

/// A job that a worker holds.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Held {
    pub(crate) job: String,
    pub(crate) run: i32,
    pub(crate) token: String,
    pub(crate) attempt: i32,
    pub(crate) call: i64,
}

impl Worker {
    /// Registers, and is admitted at once.
    pub(crate) fn register(conn: &mut Conn) -> Self {
        Self::register_with(conn, "30 s", "3 s")
    }

    pub(crate) fn register_with(conn: &mut Conn, lease_ttl: &str, heartbeat: &str) -> Self {
        let id = conn.one("SELECT random_uuid()");
        let epoch = conn.one(&format!(
            "SELECT epoch FROM register_worker('{id}', 'w', 'v1', '{lease_ttl}', '{heartbeat}', '{{*}}', 10)"
        ));
        conn.run(&format!(
            "UPDATE worker SET admitted = true WHERE id = '{id}'"
        ));
        Self {
            id,
            epoch,
            call: 0,
            beat: 0,
        }
    }

    pub(crate) fn claim_sql(&self, job_type: &str, limit: i32) -> String {
        format!(
            "SELECT id, run, token, attempt FROM claim_job_batch('{}', '{}', {}, \
             ARRAY(SELECT lane FROM lane WHERE job_type LIKE '{job_type}' ORDER BY lane), \
             ARRAY(SELECT {limit} FROM lane WHERE job_type LIKE '{job_type}'), {limit})",
            self.id, self.epoch, self.call
        )
    }

    /// Claims up to `limit` jobs of a type (a LIKE pattern).
    pub(crate) fn claim(&mut self, conn: &mut Conn, job_type: &str, limit: i32) -> Vec<Held> {
        self.try_claim(conn, job_type, limit)
            .unwrap_or_else(|refusal| panic!("{refusal:?}"))
    }

    pub(crate) fn try_claim(
        &mut self,
        conn: &mut Conn,
        job_type: &str,
        limit: i32,
    ) -> Result<Vec<Held>, Refusal> {
        self.call += 1;
        let rows = conn.try_list(&self.claim_sql(job_type, limit))?;
        Ok(rows.iter().map(|row| Held::read(row, self.call)).collect())
    }

    pub(crate) fn claim_one(&mut self, conn: &mut Conn, job_type: &str) -> Held {
        let mut held = self.claim(conn, job_type, 1);
        assert_eq!(held.len(), 1, "nothing of {job_type} to claim");
        held.remove(0)
    }

    /// Beats: all calls are settled, `open` still have jobs. Answers with the number of ghosts.
    pub(crate) fn beat(&mut self, conn: &mut Conn, open: &[i64]) -> Result<i32, Refusal> {
        self.beat += 1;
        let open: Vec<String> = open.iter().map(i64::to_string).collect();
        let rows = conn.try_list(&format!(
            "SELECT ghosts FROM heartbeat('{}', '{}', {}, {}, '{{{}}}')",
            self.id,
            self.epoch,
            self.beat,
            self.call,
            open.join(",")
        ))?;
        Ok(rows[0].parse().unwrap())
    }

    pub(crate) fn finish_sql(&self, items: &[String]) -> String {
        format!(
            "SELECT answer || coalesce(' ' || status, '') FROM finish('{}', '{}', '[{items}]') r \
             ORDER BY array_position(ARRAY(SELECT e ->> 'token' FROM jsonb_array_elements('[{items}]') e), r.token::text)",
            self.id,
            self.epoch,
            items = items.join(",")
        )
    }

    /// Says how one run ended. Answers with answer and status.
    pub(crate) fn end(&self, conn: &mut Conn, kind: &str, held: &Held, more: &str) -> String {
        conn.one(&self.finish_sql(&[held.item(kind, more)]))
    }

    /// Releases all that it holds.
    pub(crate) fn give_all_back(&self, conn: &mut Conn) {
        conn.run(&format!(
            "SELECT release('{0}', '{1}', (SELECT jsonb_agg(jsonb_build_object('job', id, 'run', run, 'token', token)) FROM lease WHERE worker = '{0}'))",
            self.id, self.epoch
        ));
    }

    /// Attaches to the present epoch with statements (see [`Held::item`]). Answers with answer and status of each, in their order.
    pub(crate) fn reattach(
        &mut self,
        conn: &mut Conn,
        statements: &[String],
        roster: &[&Worker],
        options: &str,
    ) -> Vec<String> {
        self.epoch = conn.one(&format!("SELECT epoch FROM open_epoch('{}')", self.id));
        let roster: Vec<&str> = roster.iter().map(|worker| worker.id.as_str()).collect();
        conn.list(&format!(
            "SELECT answer || coalesce(' ' || status, '') FROM reattach('{}', '{}', {}, '[{statements}]', '{{{}}}', \
             '{{\"name\":\"w\",\"lease_ttl_ms\":30000,\"heartbeat_ms\":3000,\"job_types\":[\"*\"]{options}}}') r \
             ORDER BY array_position(ARRAY(SELECT e ->> 'token' FROM jsonb_array_elements('[{statements}]') e), r.token::text)",
            self.id,
            self.epoch,
            self.beat,
            roster.join(","),
            statements = statements.join(",")
        ))
    }
}

impl Held {
    pub(crate) fn read(row: &str, call: i64) -> Self {
        let cells: Vec<&str> = row.split('|').collect();
        Self {
            job: cells[0].to_owned(),
            run: cells[1].parse().unwrap(),
            token: cells[2].to_owned(),
            attempt: cells[3].parse().unwrap(),
            call,
        }
    }

    /// An item of finish or a statement of reattach; `more` are further members, each with a comma before it.
    pub(crate) fn item(&self, kind: &str, more: &str) -> String {
        format!(
            r#"{{"kind":"{kind}","job":"{}","run":{},"token":"{}","attempt":{},"call":{},"epoch_no":1{more}}}"#,
            self.job, self.run, self.token, self.attempt, self.call
        )
    }
}

/// `by` knows that `lost` is dead, as a successor in a `state_dir` does.
pub(crate) fn lose(c: &mut Conn, by: &Worker, lost: &Worker) {
    c.run(&format!(
        "SELECT reattach('{}', '{}', 1, '[]', options => jsonb_build_object('predecessors', jsonb_build_array('{}')))",
        by.id, by.epoch, lost.id
    ));
}
