//! Jobs that a handler accepts (202) and finishes later, to any daemon.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use axum::http::StatusCode;
use axum::routing::post;
use axum::{Json, Router};
use serde_json::Value;
use tenure_runtime::completions::{Completions, Refused, Said};
use tenure_runtime::settings::{Accepts, HttpSettings};
use tenure_store::session::Db;
use tokio::net::TcpListener;
use tokio::task::JoinHandle;
use uuid::Uuid;

use super::circuits::one;
use super::*;

/// A receiver that accepts all jobs, and the tokens that it was given.
#[derive(Clone)]
struct Receiver {
    url: String,
    tokens: Arc<Mutex<BTreeMap<Uuid, Uuid>>>,
}

impl Receiver {
    /// Before it answers it calls this, with job and token.
    async fn start<F>(first: impl Fn(Uuid, Uuid) -> F + Clone + Send + Sync + 'static) -> Self
    where
        F: Future<Output = ()> + Send + 'static,
    {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let url = format!("http://{}/", listener.local_addr().unwrap());
        let tokens: Arc<Mutex<BTreeMap<Uuid, Uuid>>> = Arc::default();
        let seen = Arc::clone(&tokens);
        let accept = move |Json(job): Json<Value>| {
            let (first, seen) = (first.clone(), Arc::clone(&seen));
            async move {
                let uuid = |key: &str| job[key].as_str().unwrap().parse::<Uuid>().unwrap();
                first(uuid("id"), uuid("token")).await;
                seen.lock().unwrap().insert(uuid("id"), uuid("token"));
                StatusCode::ACCEPTED
            }
        };
        let router = Router::new().fallback(post(accept));
        tokio::spawn(async move { axum::serve(listener, router).await });
        Self { url, tokens }
    }

    async fn plain() -> Self {
        Self::start(|_, _| async {}).await
    }

    fn token(&self, job: Uuid) -> Uuid {
        self.tokens.lock().unwrap()[&job]
    }

    fn rule(&self, accepts: Accepts) -> Rule {
        Rule {
            pattern: Pattern::new("later*").unwrap(),
            kind: Some(HandlerKind::Http(HttpSettings {
                accepts,
                ..HttpSettings::at(self.url.clone())
            })),
            retry: RetryRule::default(),
            after_lost_commits: None,
            durability: None,
        }
    }
}

/// A daemon that runs here.
struct Running {
    signal: mpsc::Sender<()>,
    db: Db,
    completions: Arc<Completions>,
    ended: JoinHandle<Outcome>,
}

impl Running {
    fn start(server: &Server, concurrency: u32, rule: Option<Rule>) -> Self {
        let mut settings = settings(server, concurrency);
        settings.handlers.rules.extend(rule);
        let (signal, signals) = mpsc::channel(4);
        let daemon = Daemon::new(settings).unwrap();
        Self {
            signal,
            db: daemon.api_db().unwrap(),
            completions: daemon.completions(),
            ended: tokio::spawn(async move { daemon.run(signals).await.unwrap() }),
        }
    }

    async fn stop(self) {
        self.signal.send(()).await.unwrap();
        assert_eq!(self.ended.await.unwrap(), Outcome::Clean);
    }

    /// As a handler does: until somebody can say.
    async fn end(&self, job: Uuid, token: Uuid, said: Said) -> Result<(), Refused> {
        loop {
            match self
                .completions
                .end(&self.db, job, token, said.clone())
                .await
            {
                Err(Refused::Later(_) | Refused::Store(_)) => {
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
                answer => return answer,
            }
        }
    }
}

fn done(result: &str) -> Said {
    Said::Completed {
        result: Some(result.to_owned()),
    }
}

fn failed(retry: bool) -> Said {
    Said::Failed {
        message: Some("the disk is full".to_owned()),
        retry,
        after: None,
    }
}

fn enqueue(sql: &mut Sql) -> Uuid {
    one(sql, "SELECT tenure.enqueue('later')").parse().unwrap()
}

/// As many leases have a time of their own.
async fn accepted(sql: &mut Sql, count: usize) {
    let open = "SELECT count(*) FROM tenure.lease WHERE until IS NOT NULL";
    until(sql, open, &count.to_string()).await;
}

fn state(sql: &mut Sql, job: Uuid) -> String {
    one(
        sql,
        &format!(
            "SELECT status || ' ' || attempts || ' ' || coalesce(result::text, '-') FROM tenure.jobs WHERE id = '{job}'"
        ),
    )
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_accepted_job_takes_no_slot_and_any_daemon_finishes_it_once() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let first = Running::start(&server, 1, Some(receiver.rule(Accepts::default())));
    let second = Running::start(&server, 1, None);
    let jobs: Vec<Uuid> = (0..4).map(|_| enqueue(&mut sql)).collect();
    accepted(&mut sql, 4).await;
    let [well, badly, for_good, more] = jobs[..] else {
        panic!("four were enqueued")
    };
    let token = |job| receiver.token(job);
    second.end(well, token(well), done("[1.50]")).await.unwrap();
    assert_eq!(state(&mut sql, well), "completed 1 [1.50]");
    for daemon in [&first, &second] {
        daemon.end(well, token(well), done("[1.50]")).await.unwrap();
        let refused = daemon.end(well, token(well), failed(true)).await;
        let Err(Refused::Stale(why)) = refused else {
            panic!("{refused:?}")
        };
        assert_eq!(why, "it ended as completed, and the job is completed");
    }
    first.end(badly, token(badly), failed(true)).await.unwrap();
    assert_eq!(state(&mut sql, badly), "scheduled 1 -");
    second
        .end(for_good, token(for_good), failed(false))
        .await
        .unwrap();
    assert_eq!(state(&mut sql, for_good), "failed 1 -");
    let letter = "SELECT last_error FROM tenure.dead_letter_jobs";
    assert_eq!(one(&mut sql, letter), "the disk is full");
    let follow = r#"{"n": 1, "tenure": {"enqueue": [{"job_type": "noop"}]}}"#;
    let refused = second
        .end(more, token(more), done(r#"{"tenure": {"enqeue": []}}"#))
        .await;
    assert!(
        matches!(&refused, Err(Refused::Input(why)) if why.contains("enqeue")),
        "{refused:?}"
    );
    second.end(more, token(more), done(follow)).await.unwrap();
    assert_eq!(state(&mut sql, more), r#"completed 1 {"n": 1}"#);
    let noop = "SELECT count(*) FROM tenure.jobs WHERE job_type = 'noop'";
    assert_eq!(one(&mut sql, noop), "1");

    let wrong = second.end(Uuid::now_v7(), token(more), done("1")).await;
    assert!(matches!(wrong, Err(Refused::Unknown(_))), "{wrong:?}");
    let wrong = second.end(more, Uuid::new_v4(), done("1")).await;
    assert!(matches!(wrong, Err(Refused::Stale(_))), "{wrong:?}");
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_leaves_open_jobs_alone_and_a_stop_of_a_person_ends_them() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let first = Running::start(&server, 8, Some(receiver.rule(Accepts::default())));
    let second = Running::start(&server, 1, None);
    let jobs: Vec<Uuid> = (0..3).map(|_| enqueue(&mut sql)).collect();
    accepted(&mut sql, 3).await;
    // Its worker lives, and gives it back as soon as it hears of it.
    sql.run(&format!("SELECT tenure.cancel('{}')", jobs[0]))
        .unwrap();
    let status = format!("SELECT status FROM tenure.jobs WHERE id = '{}'", jobs[0]);
    until(&mut sql, &status, "cancelled").await;
    let stale = second
        .end(jobs[0], receiver.token(jobs[0]), done("1"))
        .await;
    assert!(matches!(stale, Err(Refused::Stale(_))), "{stale:?}");
    first.stop().await;
    let open = "SELECT count(*) FROM tenure.lease WHERE until IS NOT NULL";
    assert_eq!(one(&mut sql, open), "2");
    // Its worker is gone: a heartbeat tells, and the sweep ends it.
    sql.run(&format!("SELECT tenure.cancel('{}')", jobs[1]))
        .unwrap();
    let kept = second
        .completions
        .keep(&second.db, jobs[1], receiver.token(jobs[1]), None);
    match kept.await {
        Ok(kept) => assert_eq!(kept.stop.as_deref(), Some("cancel")),
        Err(Refused::Stale(_)) => {}
        Err(other) => panic!("{other}"),
    }
    let status = format!("SELECT status FROM tenure.jobs WHERE id = '{}'", jobs[1]);
    until(&mut sql, &status, "cancelled").await;
    second
        .end(jobs[2], receiver.token(jobs[2]), done("3"))
        .await
        .unwrap();
    assert_eq!(state(&mut sql, jobs[2]), "completed 1 3");
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_end_that_comes_before_the_202_counts() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let second = Arc::new(Running::start(&server, 1, None));
    let quick = Arc::clone(&second);
    let receiver = Receiver::start(move |job, token| {
        let quick = Arc::clone(&quick);
        async move {
            quick.end(job, token, done("7")).await.unwrap();
        }
    })
    .await;
    let first = Running::start(&server, 2, Some(receiver.rule(Accepts::default())));
    for _ in 0..20 {
        enqueue(&mut sql);
    }
    let completed = "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'";
    until(&mut sql, completed, "20").await;
    first.stop().await;
    let beside = "SELECT count(*) FROM tenure.attempts WHERE outcome <> 'completed' OR NOT applied";
    assert_eq!(one(&mut sql, beside), "0");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_ends_at_once_one_counts_and_the_other_learns_it() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let first = Running::start(&server, 16, Some(receiver.rule(Accepts::default())));
    let second = Running::start(&server, 1, None);
    let jobs: Vec<Uuid> = (0..40).map(|_| enqueue(&mut sql)).collect();
    accepted(&mut sql, 40).await;
    for (nth, job) in jobs.iter().enumerate() {
        let token = receiver.token(*job);
        // Through one daemon, and through two.
        let other = if nth % 2 == 0 { &first } else { &second };
        let (well, badly, kept) = tokio::join!(
            first.end(*job, token, done("1")),
            other.end(*job, token, failed(false)),
            second
                .completions
                .keep(&second.db, *job, token, Some("5m".to_owned())),
        );
        match (&well, &badly) {
            (Ok(()), Err(Refused::Stale(_))) => assert_eq!(state(&mut sql, *job), "completed 1 1"),
            (Err(Refused::Stale(_)), Ok(())) => assert_eq!(state(&mut sql, *job), "failed 1 -"),
            both => panic!("{both:?}"),
        }
        assert!(!matches!(
            kept,
            Err(Refused::Unknown(_) | Refused::Input(_))
        ));
    }
    first.stop().await;
    second.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_with_all_that_it_may_have_open_gets_no_more() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let few = Accepts {
        max_open: 3,
        ..Accepts::default()
    };
    let daemon = Running::start(&server, 2, Some(receiver.rule(few)));
    for _ in 0..30 {
        enqueue(&mut sql);
    }
    // Others go on meanwhile, and nothing more is accepted, not even for a moment.
    accepted(&mut sql, 3).await;
    for round in 1..=27 {
        sql.run("SELECT tenure.enqueue('noop')").unwrap();
        let done_so_far =
            "SELECT count(*) FROM tenure.jobs WHERE job_type = 'noop' AND status = 'completed'";
        until(&mut sql, done_so_far, &round.to_string()).await;
        let open = "SELECT count(*) FROM tenure.lease WHERE until IS NOT NULL";
        assert_eq!(one(&mut sql, open), "3");
        let next: Uuid = one(
            &mut sql,
            "SELECT id FROM tenure.lease WHERE until IS NOT NULL LIMIT 1",
        )
        .parse()
        .unwrap();
        daemon
            .end(next, receiver.token(next), done("1"))
            .await
            .unwrap();
        until(
            &mut sql,
            "SELECT count(*) >= 3 FROM tenure.lease WHERE until IS NOT NULL",
            "t",
        )
        .await;
    }
    daemon.stop().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_crash_of_the_database_leaves_open_jobs_open() {
    let mut server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let daemon = Running::start(&server, 8, Some(receiver.rule(Accepts::default())));
    let jobs: Vec<Uuid> = (0..50).map(|_| enqueue(&mut sql)).collect();
    accepted(&mut sql, 50).await;
    server.kill9().unwrap();
    server.restart().unwrap();
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    sql.run("SELECT tenure.enqueue('noop')").unwrap();
    let noop = "SELECT count(*) FROM tenure.jobs WHERE job_type = 'noop' AND status = 'completed'";
    until(&mut sql, noop, "1").await;
    assert_eq!(one(&mut sql, "SELECT epoch_no FROM tenure.cluster"), "2");
    for job in &jobs {
        daemon
            .end(*job, receiver.token(*job), done("2"))
            .await
            .unwrap();
    }
    let twice = "SELECT count(*) FROM tenure.attempts WHERE outcome <> 'completed'";
    assert_eq!(one(&mut sql, twice), "0");
    assert_eq!(receiver.tokens.lock().unwrap().len(), 50);
    daemon.stop().await;
}

/// A switch can lose no more than that a lease stands by itself; the next heartbeat must not take it for an unanswered claim.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lease_whose_own_time_was_lost_gets_it_again() {
    let server = database().await;
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    let receiver = Receiver::plain().await;
    let daemon = Running::start(&server, 8, Some(receiver.rule(Accepts::default())));
    let jobs: Vec<Uuid> = (0..10).map(|_| enqueue(&mut sql)).collect();
    accepted(&mut sql, 10).await;
    let tokens = receiver.tokens.lock().unwrap().clone();
    sql.run("UPDATE tenure.lease SET until = NULL; DELETE FROM tenure.here")
        .unwrap();
    let settled = "SELECT gate || epoch_no FROM tenure.cluster";
    until(&mut sql, settled, "open2").await;
    let beat: i64 = one(&mut sql, "SELECT max(beat) FROM tenure.beat")
        .parse()
        .unwrap();
    let two_more = format!("SELECT max(beat) > {} FROM tenure.beat", beat + 1);
    until(&mut sql, &two_more, "t").await;
    accepted(&mut sql, 10).await;
    for job in &jobs {
        daemon
            .end(*job, receiver.token(*job), done("2"))
            .await
            .unwrap();
    }
    assert_eq!(*receiver.tokens.lock().unwrap(), tokens, "none came again");
    daemon.stop().await;
}
