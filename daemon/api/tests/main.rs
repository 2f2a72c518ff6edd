//! The interface over real sockets and a real PostgreSQL.
#![allow(clippy::unwrap_used, clippy::panic)]

mod open;

use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusBuilder;
use reqwest::{Client, Method, Response, StatusCode};
use serde_json::{Value, json};
use tenure_api::{Access, Listener, State, router};
use tenure_core::time::Mono;
use tenure_embedded::{Options, Server};
use tenure_runtime::completions::Completions;
use tenure_runtime::guard;
use tenure_runtime::settings::{Handlers, Listen};
use tenure_runtime::status::Status;
use tenure_store::address::Address;
use tenure_store::migrate::Migrator;
use tenure_store::session::{Db, Session, Target};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixStream;
use tokio_util::sync::CancellationToken;

/// A served interface.
struct House {
    server: Server,
    client: Client,
    address: String,
    status: Arc<Status>,
    stop: CancellationToken,
    served: tokio::task::JoinHandle<std::io::Result<()>>,
}

impl House {
    async fn new(token: Option<&str>) -> Self {
        Self::at(&Listen::Tcp("127.0.0.1:0".parse().unwrap()), token).await
    }

    async fn at(listen: &Listen, token: Option<&str>) -> Self {
        // Refused when another test of this process did it before.
        let _ = rustls::crypto::ring::default_provider().install_default();
        let server = Server::start(Options::for_tests()).unwrap();
        server.create_database("app").unwrap();
        let timeout = Duration::from_secs(2);
        let target = Target {
            address: Address::parse(&server.url("app", "postgres"), None, timeout).unwrap(),
            schema: "tenure".to_owned(),
            connect_timeout: timeout,
            statement_timeout: Duration::from_secs(10),
            pooled: false,
        };
        let (session, _) = Session::open(&target).await.unwrap();
        Migrator::new(&session, "tenure").up().await.unwrap();
        let status = Arc::new(Status::default());
        status.confirmed(Mono::from_millis(guard::now_ms()));
        let state = State {
            db: Db::new(&target, 2).unwrap(),
            access: Access::new(token, matches!(listen, Listen::Tcp(_))),
            max_body: 64 << 10,
            completions: Arc::new(Completions::new(Handlers::default(), 1 << 20)),
            status: Arc::clone(&status),
            heartbeat_limit: Duration::from_secs(60),
            metrics: PrometheusBuilder::new().build_recorder().handle(),
            queue: tenure_api::Queue::default(),
        };
        let listener = Listener::open(listen).await.unwrap();
        let address = format!("http://{}", listener.address());
        let stop = CancellationToken::new();
        #[expect(clippy::disallowed_methods, reason = "a test supervises itself")]
        let served = tokio::spawn(listener.serve(router(state), stop.clone()));
        Self {
            server,
            client: Client::builder().build().unwrap(),
            address,
            status,
            stop,
            served,
        }
    }

    async fn get(&self, path: &str) -> Response {
        self.client
            .get(format!("{}{path}", self.address))
            .send()
            .await
            .unwrap()
    }

    async fn post(&self, path: &str, body: &str) -> Response {
        let request = self
            .client
            .post(format!("{}{path}", self.address))
            .header("content-type", "application/json");
        request.body(body.to_owned()).send().await.unwrap()
    }

    async fn end(self) {
        self.stop.cancel();
        self.served.await.unwrap().unwrap();
    }
}

async fn json(response: Response, status: StatusCode) -> Value {
    assert_eq!(response.headers()["content-type"], "application/json");
    assert_eq!(response.headers()["x-content-type-options"], "nosniff");
    let found = response.status();
    let text = response.text().await.unwrap();
    assert_eq!(found, status, "{text}");
    let envelope: Value = serde_json::from_str(&text).unwrap();
    assert_eq!(envelope["success"], status.is_success());
    if status.is_success() {
        envelope["data"].clone()
    } else {
        envelope["error"].clone()
    }
}

#[tokio::test]
async fn a_job_is_put_in_shown_cancelled_and_retried() {
    let house = House::new(None).await;
    let exact = r#"{"n": 18446744073709551616, "x": 0.10000000000000000000001}"#;
    let made = json(
        house
            .post(
                "/v1/jobs",
                &format!(r#"{{"job_type": "a", "data": {exact}}}"#),
            )
            .await,
        StatusCode::CREATED,
    )
    .await;
    let id = made["id"].as_str().unwrap();
    assert_eq!(made["ids"], json!([id]));
    let shown = house
        .get(&format!("/v1/jobs/{id}"))
        .await
        .text()
        .await
        .unwrap();
    assert!(shown.contains(exact), "digits stay: {shown}");
    let cancelled = json(
        house.post(&format!("/v1/jobs/{id}/cancel"), "").await,
        StatusCode::OK,
    )
    .await;
    assert_eq!(cancelled, json!({"id": id, "status": "cancelled"}));
    let retried = json(
        house.post(&format!("/v1/jobs/{id}/retry"), "").await,
        StatusCode::OK,
    )
    .await;
    assert_eq!(retried["status"], "pending");
    let again = json(
        house.post(&format!("/v1/jobs/{id}/retry"), "").await,
        StatusCode::CONFLICT,
    )
    .await;
    assert_eq!(again["code"], "refused");
    house.end().await;
}

#[tokio::test]
async fn an_array_is_put_in_whole_or_not_at_all() {
    let house = House::new(None).await;
    let made = json(
        house
            .post("/v1/jobs", r#" [{"job_type": "a"}, {"job_type": "b"}]"#)
            .await,
        StatusCode::CREATED,
    )
    .await;
    assert_eq!(made["ids"].as_array().unwrap().len(), 2);
    let error = json(
        house
            .post("/v1/jobs", r#"[{"job_type": "a"}, {"job_type": ""}]"#)
            .await,
        StatusCode::BAD_REQUEST,
    )
    .await;
    assert!(
        error["message"].as_str().unwrap().contains("job_type"),
        "{error}"
    );
    let listed = json(house.get("/v1/jobs").await, StatusCode::OK).await;
    assert_eq!(listed["jobs"].as_array().unwrap().len(), 2);
    assert_eq!(
        json(house.post("/v1/jobs", "[]").await, StatusCode::CREATED).await["ids"],
        json!([])
    );
    house.end().await;
}

#[tokio::test]
async fn pages_follow_the_cursor() {
    let house = House::new(None).await;
    let jobs: Vec<Value> = (0..5)
        .map(|n| json!({"job_type": if n < 4 { "a" } else { "b" }, "data": n}))
        .collect();
    let made = json(
        house.post("/v1/jobs", &json!(jobs).to_string()).await,
        StatusCode::CREATED,
    )
    .await;
    let mut expected: Vec<&str> = made["ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(|id| id.as_str().unwrap())
        .take(4)
        .collect();
    expected.sort_unstable_by(|a, b| b.cmp(a));
    let mut found = Vec::new();
    let mut path = "/v1/jobs?type=a&status=pending&tenant=default&limit=3".to_owned();
    loop {
        let page = json(house.get(&path).await, StatusCode::OK).await;
        found.extend(
            page["jobs"]
                .as_array()
                .unwrap()
                .iter()
                .map(|job| job["id"].as_str().unwrap().to_owned()),
        );
        let Some(cursor) = page["cursor"].as_str() else {
            break;
        };
        path = format!("/v1/jobs?type=a&limit=3&cursor={cursor}");
    }
    assert_eq!(found, expected);
    house.end().await;
}

#[tokio::test]
async fn what_is_wrong_is_said() {
    let house = House::new(None).await;
    let nobody = "0199c0c0-0000-7000-8000-000000000000";
    for (path, status, code) in [
        (
            format!("/v1/jobs/{nobody}"),
            StatusCode::NOT_FOUND,
            "not_found",
        ),
        ("/v1/jobs/nope".to_owned(), StatusCode::BAD_REQUEST, "input"),
        (
            "/v1/jobs?limit=0".to_owned(),
            StatusCode::BAD_REQUEST,
            "input",
        ),
        (
            "/v1/jobs?limit=x".to_owned(),
            StatusCode::BAD_REQUEST,
            "input",
        ),
        (
            "/v1/jobs?state=x".to_owned(),
            StatusCode::BAD_REQUEST,
            "input",
        ),
        (
            "/v1/jobs?status=done".to_owned(),
            StatusCode::BAD_REQUEST,
            "input",
        ),
        ("/nothing".to_owned(), StatusCode::NOT_FOUND, "no_such_path"),
        (
            format!("/v1/jobs/{nobody}/cancel"),
            StatusCode::METHOD_NOT_ALLOWED,
            "no_such_method",
        ),
    ] {
        assert_eq!(
            json(house.get(&path).await, status).await["code"],
            code,
            "{path}"
        );
    }
    let long = format!(r#"{{"job_type": "a", "data": "{}"}}"#, "x".repeat(64 << 10));
    let deep = format!("{}{}", "[".repeat(30_000), "]".repeat(30_000));
    for (body, status, message) in [
        ("", StatusCode::BAD_REQUEST, "no JSON"),
        ("{", StatusCode::BAD_REQUEST, "no JSON"),
        ("3", StatusCode::BAD_REQUEST, "an object"),
        ("[3]", StatusCode::BAD_REQUEST, ""),
        (
            r#"{"job_type": "a", "prioritty": 1}"#,
            StatusCode::BAD_REQUEST,
            "unknown key 'prioritty'",
        ),
        (
            r#"{"job_type": "a", "priority": "high"}"#,
            StatusCode::BAD_REQUEST,
            "high",
        ),
        (
            r#"{"job_type": "a", "data": "\u0000"}"#,
            StatusCode::BAD_REQUEST,
            "",
        ),
        (&deep, StatusCode::BAD_REQUEST, "stack depth"),
        (
            r#"{"data": 1}"#,
            StatusCode::BAD_REQUEST,
            "job_type is missing",
        ),
        (long.as_str(), StatusCode::PAYLOAD_TOO_LARGE, "api.max_body"),
    ] {
        let error = json(house.post("/v1/jobs", body).await, status).await;
        assert!(
            error["message"].as_str().unwrap().contains(message),
            "{body}: {error}"
        );
    }
    assert_eq!(
        json(house.get("/v1/jobs").await, StatusCode::OK).await["jobs"],
        json!([])
    );
    house.end().await;
}

#[tokio::test]
async fn without_a_database_nothing_is_promised() {
    let mut house = House::new(None).await;
    house.server.stop_fast().unwrap();
    let response = house.post("/v1/jobs", r#"{"job_type": "a"}"#).await;
    assert!(response.headers().contains_key("retry-after"));
    let error = json(response, StatusCode::SERVICE_UNAVAILABLE).await;
    assert_eq!(error["code"], "unreachable");
    json(house.get("/healthz").await, StatusCode::OK).await;
    house.server.restart().unwrap();
    json(
        house.post("/v1/jobs", r#"{"job_type": "a"}"#).await,
        StatusCode::CREATED,
    )
    .await;
    house.end().await;
}

#[tokio::test]
async fn probes_and_metrics_answer() {
    let house = House::new(None).await;
    json(house.get("/healthz").await, StatusCode::OK).await;
    assert_eq!(
        json(house.get("/readyz").await, StatusCode::OK).await["ready"],
        true
    );
    house.status.drain();
    let response = house.get("/readyz").await;
    assert_eq!(response.status(), StatusCode::SERVICE_UNAVAILABLE);
    assert_eq!(house.get("/metrics").await.status(), StatusCode::OK);
    house.end().await;
}

#[tokio::test]
async fn a_browser_of_another_site_gets_nothing() {
    let house = House::new(None).await;
    let jobs = format!("{}/v1/jobs", house.address);
    let send = |method: Method, headers: &[(&'static str, &'static str)]| {
        let mut request = house
            .client
            .request(method, &jobs)
            .body(r#"{"job_type": "a"}"#);
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        request.send()
    };
    let json_type = ("content-type", "application/json");
    for (method, headers, status) in [
        (
            Method::POST,
            vec![json_type, ("host", "evil.example")],
            StatusCode::FORBIDDEN,
        ),
        (
            Method::GET,
            vec![("host", "evil.example")],
            StatusCode::FORBIDDEN,
        ),
        (
            Method::POST,
            vec![json_type, ("origin", "http://evil.example")],
            StatusCode::FORBIDDEN,
        ),
        (
            Method::POST,
            vec![json_type, ("sec-fetch-site", "cross-site")],
            StatusCode::FORBIDDEN,
        ),
        (
            Method::POST,
            vec![("content-type", "text/plain")],
            StatusCode::UNSUPPORTED_MEDIA_TYPE,
        ),
        (Method::POST, vec![], StatusCode::UNSUPPORTED_MEDIA_TYPE),
    ] {
        let response = send(method, &headers).await.unwrap();
        assert_eq!(response.status(), status, "{headers:?}");
    }
    let health = house
        .client
        .get(format!("{}/healthz", house.address))
        .header("host", "evil.example")
        .send()
        .await
        .unwrap();
    assert_eq!(health.status(), StatusCode::FORBIDDEN);
    assert_eq!(
        json(house.get("/v1/jobs").await, StatusCode::OK).await["jobs"],
        json!([])
    );
    house.end().await;
}

#[tokio::test]
async fn a_token_guards_jobs_and_metrics() {
    let house = House::new(Some("open sesame")).await;
    for path in ["/v1/jobs", "/metrics"] {
        let response = house.get(path).await;
        assert_eq!(response.headers()["www-authenticate"], "Bearer");
        assert_eq!(
            json(response, StatusCode::UNAUTHORIZED).await["code"],
            "unauthorized"
        );
        let url = format!("{}{path}", house.address);
        let good = house
            .client
            .get(url)
            .bearer_auth("open sesame")
            .send()
            .await
            .unwrap();
        assert_eq!(good.status(), StatusCode::OK);
    }
    json(house.get("/healthz").await, StatusCode::OK).await;
    house.end().await;
}

#[tokio::test]
async fn a_unix_socket_is_served_replaced_and_removed() {
    let folder = tempfile::tempdir().unwrap();
    let path: PathBuf = folder.path().join("api.sock");
    drop(std::os::unix::net::UnixListener::bind(&path).unwrap());
    let house = House::at(&Listen::Unix(path.clone()), None).await;
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o660);
    let mut stream = UnixStream::connect(&path).await.unwrap();
    stream
        .write_all(b"GET /v1/jobs HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        .await
        .unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).await.unwrap();
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    let taken = Listener::open(&Listen::Unix(path.clone()))
        .await
        .err()
        .unwrap()
        .to_string();
    assert!(taken.contains("another process listens there"), "{taken}");
    house.end().await;
    assert!(!path.exists());
}
