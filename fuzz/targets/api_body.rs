//! Requests to the HTTP interface, up to where the database would be asked: there is none.
//!
//! Input: a letter for the way of access, `METHOD PATH`, header lines, an empty line; then the body.
#![no_main]

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::body::Body;
use axum::http::{Method, Request, StatusCode, header};
use libfuzzer_sys::fuzz_target;
use metrics_exporter_prometheus::PrometheusBuilder;
use serde_json::Value;
use serde_json::value::RawValue;
use tenure_api::{Access, Queue, State, router};
use tenure_runtime::completions::Completions;
use tenure_runtime::settings::Handlers;
use tenure_runtime::status::Status;
use tenure_store::address::Address;
use tenure_store::session::{Db, Target};
use tokio::runtime::{Builder, Runtime};
use tower::ServiceExt as _;

/// The longest body that is taken, in bytes.
const MAX_BODY: usize = 2000;

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_all().build().unwrap();
    static ROUTERS: [Router; 3] = [
        served(Access::new(None, true)),
        served(Access::new(Some("secret"), true)),
        served(Access::new(None, false)),
    ];
}

fuzz_target!(|data: &[u8]| {
    let Some((access, request, body)) = read(data) else {
        return;
    };
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let router = ROUTERS.with(|routers| routers[access].clone());
    let (status, headers, answer) = RUNTIME.with(|runtime| {
        runtime.block_on(async {
            let response = router.oneshot(request).await.unwrap();
            let (head, answer) = response.into_parts();
            let answer = axum::body::to_bytes(answer, usize::MAX).await.unwrap();
            (head.status, head.headers, answer)
        })
    });
    // What is wrong is the request, or that there is no database.
    assert!(
        status.is_success()
            || status.is_client_error()
            || status == StatusCode::SERVICE_UNAVAILABLE,
        "{status}"
    );
    if path == "/metrics" && status == StatusCode::OK {
        return;
    }
    assert_eq!(headers[header::CONTENT_TYPE], "application/json");
    assert_eq!(headers[header::X_CONTENT_TYPE_OPTIONS], "nosniff");
    assert_eq!(headers[header::CACHE_CONTROL], "no-store");
    if method == Method::HEAD {
        return;
    }
    let envelope: Value = serde_json::from_slice(&answer).unwrap();
    if path == "/healthz" || path == "/readyz" {
        return;
    }
    assert_eq!(envelope["success"], false, "nothing can succeed");
    let error = &envelope["error"];
    assert!(
        error["message"]
            .as_str()
            .is_some_and(|message| !message.is_empty())
    );
    if status == StatusCode::SERVICE_UNAVAILABLE {
        assert_eq!(error["code"], "unreachable");
        assert!(method != Method::POST || path != "/v1/jobs" || is_jobs(body));
    }
});

/// Whether it is JSON that can be a job or several.
fn is_jobs(body: &[u8]) -> bool {
    body.len() <= MAX_BODY
        && serde_json::from_slice::<&RawValue>(body)
            .is_ok_and(|json| json.get().starts_with(['{', '[']))
}

fn read(data: &[u8]) -> Option<(usize, Request<Body>, &[u8])> {
    let (access, data) = data.split_first()?;
    let at = data.windows(2).position(|window| window == b"\n\n")?;
    let (head, body) = (&data[..at], &data[at + 2..]);
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = lines.next()?;
    let space = first.iter().position(|byte| *byte == b' ')?;
    let mut request = Request::builder()
        .method(&first[..space])
        .uri(&first[space + 1..]);
    for line in lines {
        let colon = line.iter().position(|byte| *byte == b':')?;
        request = request.header(&line[..colon], line[colon + 1..].trim_ascii());
    }
    let request = request.body(Body::from(body.to_vec())).ok()?;
    Some((usize::from(*access) % 3, request, body))
}

/// The interface of a daemon whose database is nowhere.
fn served(access: Access) -> Router {
    let timeout = Duration::from_secs(2);
    let target = Target {
        address: Address::parse("postgres://tenure@%2Fnowhere/app", None, timeout).unwrap(),
        schema: "tenure".to_owned(),
        connect_timeout: timeout,
        statement_timeout: timeout,
        pooled: false,
    };
    router(State {
        db: Db::new(&target, 1).unwrap(),
        access,
        max_body: MAX_BODY,
        completions: Arc::new(Completions::new(Handlers::default(), MAX_BODY)),
        status: Arc::new(Status::default()),
        heartbeat_limit: timeout,
        metrics: PrometheusBuilder::new().build_recorder().handle(),
        queue: Queue::default(),
    })
}
