//! The HTTP interface: jobs for programs of any language, and what probes and Prometheus ask.
//!
//! `access` decides who may speak, `answer` is the one envelope, `jobs`, `open` and `health` say what there is, `listen` opens
//! the address. A request is answered with success only after the database has committed what it asked for.

mod access;
mod answer;
mod health;
mod jobs;
mod listen;
mod open;
mod queue;
mod state;

use axum::Router;
use axum::extract::{DefaultBodyLimit, Request, State as Extract};
use axum::http::{Method, StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::{get, post};

use answer::{Answer, Problem, good};
use health::Readiness;
use state::Shared;

pub use access::Access;
pub use listen::{ListenError, Listener};
pub use queue::Queue;
pub use state::State;

/// The routes.
pub fn router(state: State) -> Router {
    let most = state.max_body;
    let shared = Shared::from(state);
    let guarded = Router::new()
        .route("/metrics", get(metrics))
        .route("/v1/jobs", post(jobs::enqueue).get(jobs::list))
        .route("/v1/jobs/{id}", get(jobs::show))
        .route("/v1/jobs/{id}/cancel", post(jobs::cancel))
        .route("/v1/jobs/{id}/retry", post(jobs::retry))
        .route("/v1/jobs/{id}/complete", post(open::complete))
        .route("/v1/jobs/{id}/fail", post(open::fail))
        .route("/v1/jobs/{id}/heartbeat", post(open::heartbeat))
        .route_layer(middleware::from_fn_with_state(shared.clone(), guard));
    Router::new()
        .route("/healthz", get(healthz))
        .route("/readyz", get(readyz))
        .merge(guarded)
        .fallback(no_such_path)
        .method_not_allowed_fallback(no_such_method)
        .layer(DefaultBodyLimit::max(most))
        .layer(middleware::from_fn_with_state(shared.clone(), same_site))
        .with_state(shared)
}

async fn same_site(Extract(shared): Extract<Shared>, request: Request, next: Next) -> Response {
    match shared.access.check_site(request.headers()) {
        Ok(()) => next.run(request).await,
        Err(denied) => Problem::from(denied).into_response(),
    }
}

async fn guard(Extract(shared): Extract<Shared>, request: Request, next: Next) -> Response {
    match shared.access.check(request.method(), request.headers()) {
        Ok(()) => next.run(request).await,
        Err(denied) => Problem::from(denied).into_response(),
    }
}

/// The process lives. It never depends on the database: a probe that did would restart daemons in an outage, and with
/// them the handlers that could go on.
async fn healthz() -> Answer {
    good(StatusCode::OK, &"alive")
}

async fn readyz(Extract(shared): Extract<Shared>) -> Answer {
    let readiness = Readiness::of(&shared.status, shared.heartbeat_limit);
    let status = if readiness.ready {
        StatusCode::OK
    } else {
        StatusCode::SERVICE_UNAVAILABLE
    };
    good(status, &readiness)
}

async fn metrics(Extract(shared): Extract<Shared>) -> Response {
    const TEXT: &str = "text/plain; version=0.0.4; charset=utf-8";
    shared.status.write_metrics();
    shared.queue.write_metrics(&shared.db).await;
    ([(header::CONTENT_TYPE, TEXT)], shared.metrics.render()).into_response()
}

async fn no_such_path(request: Request) -> Problem {
    Problem::new(
        StatusCode::NOT_FOUND,
        "no_such_path",
        format!("there is nothing at {}", request.uri().path()),
    )
}

async fn no_such_method(method: Method, request: Request) -> Problem {
    let message = format!("{} does not take {method}", request.uri().path());
    Problem::new(StatusCode::METHOD_NOT_ALLOWED, "no_such_method", message)
}
