//! The whole daemon in this process, with a real PostgreSQL server. Handlers that are processes are tested with the real
//! binary, in `chaos-tests`.

mod circuits;
mod open;

use std::time::Duration;

use tenure_core::pattern::Pattern;
use tenure_embedded::{Options, Server, Sql};
use tenure_runtime::daemon::{Daemon, Outcome};
use tenure_runtime::settings::{
    Api, Database, HandlerKind, Handlers, Log, LogFormat, Pooler, RetryRule, Rule, Secret,
    Settings, Worker,
};
use tenure_store::address::Address;
use tenure_store::migrate::Migrator;
use tenure_store::session::{Session, Target};
use tokio::sync::mpsc;

/// A migrated database.
async fn database() -> Server {
    let _ = tracing_subscriber::fmt().with_test_writer().try_init();
    let server = Server::start(Options::for_tests()).unwrap();
    server.create_database("app").unwrap();
    let wait = Duration::from_secs(20);
    let target = Target {
        address: Address::parse(&server.url("app", "postgres"), None, wait).unwrap(),
        schema: "tenure".into(),
        connect_timeout: wait,
        statement_timeout: wait,
        pooled: false,
    };
    let (session, _) = Session::open(&target).await.unwrap();
    Migrator::new(&session, "tenure").up().await.unwrap();
    server
}

fn settings(server: &Server, concurrency: u32) -> Settings {
    let noop = Rule {
        pattern: Pattern::new("noop*").unwrap(),
        kind: Some(HandlerKind::Noop),
        retry: RetryRule::default(),
        after_lost_commits: None,
        durability: None,
    };
    Settings {
        database: Database {
            url: Secret::new(server.url("app", "postgres")),
            direct_url: None,
            password: None,
            schema: "tenure".into(),
            pool_size: 2,
            pooler: Pooler::None,
            connect_timeout: Duration::from_secs(5),
            statement_timeout: Duration::from_secs(30),
        },
        worker: Worker {
            name: "test".into(),
            version: "v1".into(),
            concurrency,
            lease_ttl: Duration::from_secs(30),
            heartbeat: Duration::from_secs(1),
            state_dir: None,
            drain_timeout: Duration::from_secs(20),
            poll_interval: Duration::from_secs(3),
            max_result: 1 << 20,
            log_tail: 1 << 14,
        },
        pools: vec![],
        handlers: Handlers { rules: vec![noop] },
        api: Api {
            listen: None,
            token: None,
            max_body: 1 << 20,
            public_url: None,
        },
        log: Log {
            format: LogFormat::Text,
            level: "info".into(),
        },
    }
}

/// Waits until the query answers with `wanted`.
async fn until(sql: &mut Sql, query: &str, wanted: &str) {
    for _ in 0..3000 {
        let rows = sql.run(query).unwrap();
        if rows[0][0].as_deref() == Some(wanted) {
            return;
        }
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    panic!(
        "{query} never was {wanted}, but {:?}",
        sql.run(query).unwrap()[0]
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn jobs_come_to_their_outcome_and_a_signal_ends_it_cleanly() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let (signal, signals) = mpsc::channel(4);
    let daemon = Daemon::new(settings(&server, 64)).unwrap();
    let running = tokio::spawn(daemon.run(signals));
    sql.run("SELECT tenure.enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'noop' || i % 3, 'priority', i % 2)) FROM generate_series(1, 3000) i))").unwrap();
    until(
        &mut sql,
        "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'",
        "3000",
    )
    .await;
    sql.run("SELECT tenure.enqueue('noop1', run_at => now() + interval '300 ms')")
        .unwrap();
    until(
        &mut sql,
        "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'",
        "3001",
    )
    .await;
    signal.send(()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Clean);
    assert_eq!(
        sql.run("SELECT status FROM tenure.workers").unwrap()[0][0].as_deref(),
        Some("stopped")
    );
    assert_eq!(
        sql.run("SELECT count(*) FROM tenure.attempts WHERE NOT applied")
            .unwrap()[0][0]
            .as_deref(),
        Some("0")
    );
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_the_database_loses_nothing_and_runs_nothing_twice() {
    let mut server = database().await;
    let (signal, signals) = mpsc::channel(4);
    let daemon = Daemon::new(settings(&server, 64)).unwrap();
    let running = tokio::spawn(daemon.run(signals));
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    sql.run("SELECT tenure.enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'noop')) FROM generate_series(1, 500) i))").unwrap();
    until(
        &mut sql,
        "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'",
        "500",
    )
    .await;
    drop(sql);
    server.kill9().unwrap();
    server.restart().unwrap();
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    sql.run("SELECT tenure.enqueue_many((SELECT jsonb_agg(jsonb_build_object('job_type', 'noop')) FROM generate_series(1, 500) i))").unwrap();
    until(
        &mut sql,
        "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'",
        "1000",
    )
    .await;
    assert_eq!(
        sql.run("SELECT epoch_no FROM tenure.cluster").unwrap()[0][0].as_deref(),
        Some("2")
    );
    assert_eq!(
        sql.run("SELECT count(*) FROM tenure.attempts").unwrap()[0][0].as_deref(),
        Some("1000")
    );
    signal.send(()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Clean);
}
