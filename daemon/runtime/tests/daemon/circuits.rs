//! Handlers that are away, under a whole daemon.

use std::net::SocketAddr;

use axum::Router;
use axum::http::StatusCode;
use axum::routing::any;
use tenure_core::breaker::FAILURES;
use tenure_runtime::settings::HttpSettings;
use tokio::net::TcpListener;

use super::*;

/// A rule that posts to this address, whose jobs fail for good at their second failed attempt.
pub(super) fn posting(to: SocketAddr) -> Rule {
    let http = HttpSettings::at(format!("http://{to}/jobs"));
    Rule {
        pattern: Pattern::new("post*").unwrap(),
        kind: Some(HandlerKind::Http(http)),
        retry: RetryRule {
            max_attempts: Some(2),
            delay: Some(Duration::from_millis(500)),
            max_delay: Some(Duration::from_secs(1)),
        },
        after_lost_commits: None,
        durability: None,
    }
}

/// Answers each request with this status, from now on.
pub(super) async fn answer(at: SocketAddr, status: StatusCode) -> SocketAddr {
    let listener = TcpListener::bind(at).await.unwrap();
    let address = listener.local_addr().unwrap();
    let router = Router::new().fallback(any(move || async move { status }));
    tokio::spawn(async move { axum::serve(listener, router).await });
    address
}

fn nobody() -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    listener.local_addr().unwrap()
}

async fn enqueued(server: &Server, job_type: &str, count: usize) -> Sql {
    let mut sql = Sql::connect(server.port(), "app", "postgres").unwrap();
    sql.run(&format!(
        "SELECT tenure.enqueue('{job_type}' || i % 3) FROM generate_series(1, {count}) i"
    ))
    .unwrap();
    sql
}

pub(super) fn one(sql: &mut Sql, query: &str) -> String {
    sql.run(query).unwrap()[0][0].clone().unwrap()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_that_refuses_connections_burns_no_attempts_and_is_found_again() {
    let server = database().await;
    let mut sql = enqueued(&server, "post", 40).await;
    let away = nobody();
    let mut settings = settings(&server, 4);
    settings.handlers.rules.push(posting(away));
    let (signal, signals) = mpsc::channel(4);
    let running = tokio::spawn(Daemon::new(settings).unwrap().run(signals));
    // Those who were under way when it opened, and the first probes, went back.
    until(
        &mut sql,
        "SELECT count(*) > 1 FROM tenure.attempts WHERE outcome = 'released' AND error LIKE '%refused%'",
        "t",
    )
    .await;
    let failed = "SELECT count(*) FROM tenure.attempts WHERE outcome = 'failed'";
    let counted = u64::from(FAILURES) - 1;
    assert_eq!(one(&mut sql, failed), counted.to_string());
    answer(away, StatusCode::OK).await;
    let done = "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'";
    until(&mut sql, done, "40").await;
    assert_eq!(one(&mut sql, failed), counted.to_string());
    signal.send(()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Clean);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_wrong_address_takes_a_few_jobs_along_and_other_handlers_go_on() {
    let server = database().await;
    let mut sql = enqueued(&server, "post", 200).await;
    let wrong = answer("127.0.0.1:0".parse().unwrap(), StatusCode::NOT_FOUND).await;
    let mut settings = settings(&server, 4);
    settings.handlers.rules.push(posting(wrong));
    let (signal, signals) = mpsc::channel(4);
    let running = tokio::spawn(Daemon::new(settings).unwrap().run(signals));
    let failed = "SELECT count(*) FROM tenure.attempts WHERE outcome = 'failed'";
    until(&mut sql, &failed.replace("count(*)", "count(*) >= 5"), "t").await;
    enqueued(&server, "noop", 300).await;
    let done = "SELECT count(*) FROM tenure.jobs WHERE status = 'completed'";
    until(&mut sql, done, "300").await;
    // The four that were under way when it opened, and single ones to try it with since then.
    let tried: u32 = one(&mut sql, failed).parse().unwrap();
    assert!(
        tried < 40,
        "{tried} of 200 jobs were spent on a wrong address"
    );
    signal.send(()).await.unwrap();
    assert_eq!(running.await.unwrap().unwrap(), Outcome::Clean);
}
