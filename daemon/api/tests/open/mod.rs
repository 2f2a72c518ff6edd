//! What handlers that accepted a job say to a daemon: whole requests, with a daemon that works behind them.

use tenure_core::pattern::Pattern;
use tenure_runtime::daemon::{Daemon, Outcome};
use tenure_runtime::settings::{HandlerKind, RetryRule, Rule, Secret, Settings};
use tokio::sync::mpsc;
use uuid::Uuid;

use super::*;

/// A daemon with its interface.
struct Working {
    house: House,
    signal: mpsc::Sender<()>,
    ended: tokio::task::JoinHandle<Outcome>,
}

impl Working {
    async fn new(token: Option<&str>) -> Self {
        let mut house = House::new(token).await;
        house.stop.cancel();
        let url = house.server.url("app", "postgres");
        let rule = Rule {
            pattern: Pattern::new("noop").unwrap(),
            kind: Some(HandlerKind::Noop),
            retry: RetryRule::default(),
            after_lost_commits: None,
            durability: None,
        };
        let database = tenure_runtime::settings::Database {
            url: Secret::new(url),
            direct_url: None,
            password: None,
            schema: "tenure".to_owned(),
            pool_size: 2,
            pooler: tenure_runtime::settings::Pooler::None,
            connect_timeout: Duration::from_secs(2),
            statement_timeout: Duration::from_secs(10),
        };
        let handlers = Handlers { rules: vec![rule] };
        let settings = Settings::for_bench(database, "tenure", 2, 4, handlers);
        let daemon = Daemon::new(settings).unwrap();
        let state = State {
            db: daemon.api_db().unwrap(),
            access: Access::new(token, true),
            max_body: 64 << 10,
            completions: daemon.completions(),
            status: daemon.status(),
            heartbeat_limit: Duration::from_secs(60),
            metrics: PrometheusBuilder::new().build_recorder().handle(),
            queue: tenure_api::Queue::default(),
        };
        let (signal, signals) = mpsc::channel(4);
        let listener = Listener::open(&Listen::Tcp("127.0.0.1:0".parse().unwrap()))
            .await
            .unwrap();
        house.address = format!("http://{}", listener.address());
        house.stop = CancellationToken::new();
        #[expect(clippy::disallowed_methods, reason = "a test supervises itself")]
        let (served, ended) = (
            tokio::spawn(listener.serve(router(state), house.stop.clone())),
            tokio::spawn(async move { daemon.run(signals).await.unwrap() }),
        );
        house.served = served;
        Self {
            house,
            signal,
            ended,
        }
    }

    /// A job that a worker of some other daemon has claimed, and its token.
    fn claimed(&self) -> (String, String) {
        let mut sql = self.sql();
        let job = sql.run("SELECT tenure.enqueue('later')").unwrap()[0][0].clone();
        sql.run("SELECT tenure.register_worker('00000000-0000-0000-0000-00000000000a', 'other', '', interval '1 hour', interval '1 minute', '{later}', 1)")
            .unwrap();
        // Its first claim may come before the daemon has heard of it.
        let claim = "SELECT c.token FROM tenure.cluster k, tenure.lane l, tenure.claim_job_batch('00000000-0000-0000-0000-00000000000a', k.epoch, 1, ARRAY[l.lane], '{1}') c WHERE l.job_type = 'later'";
        sql.run("UPDATE tenure.worker SET admitted = true").unwrap();
        let token = sql.run(claim).unwrap()[0][0].clone();
        (job.unwrap(), token.unwrap())
    }

    fn sql(&self) -> tenure_embedded::Sql {
        tenure_embedded::Sql::connect(self.house.server.port(), "app", "postgres").unwrap()
    }

    /// Says it until the daemon works and somebody can say what became of it.
    async fn say(&self, job: &str, what: &str, body: &str) -> (StatusCode, Value) {
        loop {
            let response = self
                .house
                .post(&format!("/v1/jobs/{job}/{what}"), body)
                .await;
            let status = response.status();
            if status != StatusCode::SERVICE_UNAVAILABLE {
                let envelope: Value =
                    serde_json::from_str(&response.text().await.unwrap()).unwrap();
                assert_eq!(envelope["success"], status.is_success());
                let of = if status.is_success() { "data" } else { "error" };
                return (status, envelope[of].clone());
            }
            assert_eq!(response.headers()["retry-after"], "2");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    async fn end(self) {
        self.signal.send(()).await.unwrap();
        assert_eq!(self.ended.await.unwrap(), Outcome::Clean);
        self.house.end().await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_handler_says_how_it_goes_on_and_how_it_ended() {
    let working = Working::new(None).await;
    let (job, token) = working.claimed();
    let with = |rest: &str| format!(r#"{{"token": "{token}"{rest}}}"#);
    let (status, kept) = working
        .say(&job, "heartbeat", &with(r#", "for": "5m""#))
        .await;
    assert_eq!((status, &kept["stop"]), (StatusCode::OK, &Value::Null));
    let left = kept["held_for_seconds"].as_f64().unwrap();
    assert!((295.0..=300.0).contains(&left), "{kept}");
    let digits = "18446744073709551616";
    let body = with(&format!(r#", "result": {{"n": {digits}}}"#));
    for _ in 0..2 {
        let (status, ended) = working.say(&job, "complete", &body).await;
        assert_eq!(
            (status, &ended["confirmed"]),
            (StatusCode::OK, &json!(true))
        );
    }
    let shown = working.house.get(&format!("/v1/jobs/{job}")).await;
    assert!(shown.text().await.unwrap().contains(digits));
    for (what, body) in [
        ("fail", with(r#", "message": "no""#)),
        ("heartbeat", with("")),
    ] {
        let (status, stale) = working.say(&job, what, &body).await;
        assert_eq!(
            (status, &stale["code"]),
            (StatusCode::CONFLICT, &json!("stale"))
        );
        let message = stale["message"].as_str().unwrap();
        assert!(message.contains("it ended as completed"), "{message}");
    }
    working.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_is_wrong_with_the_word_of_a_handler_is_said_and_changes_nothing() {
    let working = Working::new(None).await;
    let (job, token) = working.claimed();
    let with = |rest: &str| format!(r#"{{"token": "{token}"{rest}}}"#);
    let long = format!(r#", "result": "{}""#, "x".repeat(100_000));
    for (what, body, status, said) in [
        (
            "complete",
            "{}".to_owned(),
            StatusCode::BAD_REQUEST,
            "missing field `token`",
        ),
        (
            "complete",
            with(r#", "reslt": 1"#),
            StatusCode::BAD_REQUEST,
            "reslt",
        ),
        (
            "complete",
            with(r#", "result": {"tenure": {"snoze": "1m"}}"#),
            StatusCode::BAD_REQUEST,
            "snoze",
        ),
        (
            "complete",
            with(&long),
            StatusCode::PAYLOAD_TOO_LARGE,
            "max_body",
        ),
        (
            "fail",
            with(r#", "after": "30""#),
            StatusCode::BAD_REQUEST,
            "after: found \"30\"",
        ),
        (
            "heartbeat",
            with(r#", "for": "0s""#),
            StatusCode::BAD_REQUEST,
            "for: found",
        ),
        (
            "heartbeat",
            format!(r#"{{"token": "{}"}}"#, Uuid::new_v4()),
            StatusCode::CONFLICT,
            "the job is running",
        ),
    ] {
        let (found, error) = working.say(&job, what, &body).await;
        assert_eq!(found, status, "{error}");
        let message = error["message"].as_str().unwrap();
        assert!(message.contains(said), "{message}");
    }
    let (status, _) = working
        .say(&Uuid::now_v7().to_string(), "complete", &with(""))
        .await;
    assert_eq!(status, StatusCode::NOT_FOUND);
    let (status, _) = working.say("x", "complete", &with("")).await;
    assert_eq!(status, StatusCode::BAD_REQUEST);
    let open = "SELECT count(*) FROM tenure.lease WHERE until IS NULL";
    assert_eq!(working.sql().run(open).unwrap()[0][0].as_deref(), Some("1"));
    working.end().await;
}

/// What a switch may have lost is nobody's to refuse before the workers have spoken.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn while_workers_re_attach_a_run_that_is_not_there_is_asked_for_again() {
    let working = Working::new(None).await;
    let (job, _) = working.claimed();
    let body = format!(r#"{{"token": "{}", "result": 1}}"#, Uuid::new_v4());
    assert_eq!(
        working.say(&job, "complete", &body).await.0,
        StatusCode::CONFLICT
    );
    working
        .sql()
        .run("UPDATE tenure.cluster SET gate = 'hold'")
        .unwrap();
    let refused = working
        .house
        .post(&format!("/v1/jobs/{job}/complete"), &body)
        .await;
    let error = json(refused, StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(error["code"], "unconfirmed");
    working
        .sql()
        .run("UPDATE tenure.cluster SET gate = 'open'")
        .unwrap();
    assert_eq!(
        working.say(&job, "complete", &body).await.0,
        StatusCode::CONFLICT
    );
    working.end().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_token_of_a_run_does_not_open_the_interface() {
    let working = Working::new(Some("secret")).await;
    let (job, token) = working.claimed();
    let path = format!("/v1/jobs/{job}/complete");
    let body = format!(r#"{{"token": "{token}"}}"#);
    let refused = working.house.post(&path, &body).await;
    json(refused, StatusCode::UNAUTHORIZED).await;
    working.end().await;
}
