//! The migrations of the switch record come while old programs work: nothing is lost, and nobody sees more than a call to repeat.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use tenure_store::migrate::MIGRATIONS;

use crate::support::{Conn, Db, Lab, Worker};

/// As many as the last release had.
const BEFORE: usize = 9;

#[test]
fn upgrade_under_load() {
    let lab = Lab::start_empty();
    lab.server.create_database("upgraded").unwrap();
    old_database(&mut lab.reopen("upgraded").connect_as("postgres"));
    let db = lab.reopen("upgraded");
    db.connect().run("SELECT lane_of('m')");
    let over = AtomicBool::new(false);
    let clients: Vec<Client> = thread::scope(|scope| {
        let running: Vec<_> = (0..3)
            .map(|_| scope.spawn(|| Client::work(&db, &over)))
            .collect();
        let watch = |enough: &str| db.connect().wait_for(enough, "t");
        watch("SELECT count(*) > 60 FROM outcome");
        let applied = lab.migrate("upgraded", "postgres", "tenure").unwrap();
        assert_eq!(applied.len(), MIGRATIONS.len() - BEFORE);
        let done: i64 = db
            .connect()
            .one("SELECT count(*) FROM outcome")
            .parse()
            .unwrap();
        watch(&format!("SELECT count(*) > {} FROM outcome", done + 60));
        over.store(true, Ordering::Relaxed);
        running.into_iter().map(|one| one.join().unwrap()).collect()
    });
    let mut c = db.connect();
    for client in &clients {
        for (job, times) in &client.completed {
            assert_eq!(*times, 1, "job {job}");
            assert_eq!(c.state(job), "completed/1");
        }
        for code in &client.repeated {
            // Serialization failures, deadlocks and lock time-outs: the call had no effect, and is made again.
            assert!(
                ["40P01", "40001", "55P03"].contains(&code.as_str()),
                "{code}"
            );
        }
    }
    let enqueued: usize = clients.iter().map(|client| client.enqueued).sum();
    let completed: usize = clients.iter().map(|client| client.completed.len()).sum();
    let repeated: usize = clients.iter().map(|client| client.repeated.len()).sum();
    println!("{enqueued} enqueued, {completed} completed, {repeated} calls repeated");
    assert_eq!(c.one("SELECT count(*) FROM job"), enqueued.to_string());
    assert_eq!(c.one("SELECT count(*) FROM outcome"), completed.to_string());
    assert_eq!(
        c.one("SELECT system_id IS NOT NULL AND timeline = 1 AND NOT unaccepted AND NOT uncovered AND gate = 'open' FROM cluster"),
        "t",
        "it knows where it is, and no switch is seen"
    );
    assert_eq!(c.one("SELECT count(*) FROM switch"), "0");
    db.sound();
    a_switch_after_it(&mut c);
    db.sound();
}

/// What the last release made, with what it noted.
fn old_database(c: &mut Conn) {
    c.run("CREATE SCHEMA tenure; SET search_path = tenure, pg_temp");
    c.run("CREATE TABLE migration (name text PRIMARY KEY, checksum text NOT NULL, breaking boolean NOT NULL, applied_at timestamptz NOT NULL DEFAULT now())");
    for migration in &MIGRATIONS[..BEFORE] {
        c.run(migration.sql);
        c.run(&format!(
            "INSERT INTO migration (name, checksum, breaking) VALUES ('{}', '{}', {})",
            migration.name,
            migration.checksum(),
            migration.breaking()
        ));
    }
    assert_eq!(
        c.one("SELECT count(*) FROM pg_class WHERE relname = 'switch' AND relnamespace = 'tenure'::regnamespace"),
        "0"
    );
}

/// A program of the last release: it enqueues, claims, asserts and completes on one session, and repeats what failed.
struct Client {
    c: Conn,
    completed: HashMap<String, u32>,
    repeated: Vec<String>,
    enqueued: usize,
}

impl Client {
    fn work(db: &Db<'_>, over: &AtomicBool) -> Self {
        let mut this = Self {
            c: db.connect(),
            completed: HashMap::new(),
            repeated: Vec::new(),
            enqueued: 0,
        };
        let mut w = Worker::register(&mut this.c);
        while !over.load(Ordering::Relaxed) {
            this.repeat("SELECT enqueue('m', unique_key => NULL)");
            this.enqueued += 1;
            w.call += 1;
            let claim = w.claim_sql("m", 2);
            for row in this.repeat(&claim) {
                let held = crate::support::Held::read(&row, w.call);
                this.repeat(&format!(
                    "SELECT assert_lease('{}', '{}')",
                    held.job, held.token
                ));
                let finish = w.finish_sql(&[held.item("completed", "")]);
                let answer = this.repeat(&finish);
                assert_eq!(answer, ["done completed"]);
                *this.completed.entry(held.job).or_default() += 1;
            }
            this.repeat(&format!(
                "SELECT heartbeat('{0}', '{1}', 1, {2}, '{{{2}}}'); SELECT sweep('{1}')",
                w.id, w.epoch, w.call
            ));
        }
        this
    }

    fn repeat(&mut self, statement: &str) -> Vec<String> {
        loop {
            match self.c.try_list(statement) {
                Ok(rows) => return rows,
                Err(refusal) => self.repeated.push(refusal.code),
            }
        }
    }
}

/// A worker that knows nothing of the new options re-attaches as before.
fn a_switch_after_it(c: &mut Conn) {
    c.run("UPDATE worker SET status = 'stopped', ended_at = now()");
    let mut w = Worker::register(c);
    c.enqueue("m", "");
    let held = w.claim_one(c, "m");
    c.lose_here();
    assert_eq!(w.reattach(c, &[held.item("hold", "")], &[], ""), ["kept"]);
    assert_eq!(c.one("SELECT gate FROM cluster"), "open");
    assert_eq!(w.end(c, "completed", &held, ""), "done completed");
    assert_eq!(
        c.one("SELECT cause, closed_at IS NOT NULL FROM switches"),
        "crash|t"
    );
}
