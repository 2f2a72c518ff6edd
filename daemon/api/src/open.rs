//! `/v1/jobs/{id}/complete`, `fail`, `heartbeat`: handlers that accepted a job (202) say how it goes on and how it ended. Whoever has the
//! token of the run may say it, to any daemon.

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection};
use axum::extract::{Path, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::value::RawValue;
use tenure_runtime::completions::{Refused, Said};
use tenure_store::error::StoreError;
use uuid::Uuid;

use crate::answer::{Answer, Problem, good};
use crate::jobs::{read, too_large};
use crate::state::Shared;

/// For whoever got no word of the database.
const AGAIN: &str = "say it again, to this daemon or another: it counts once";

/// The body of `complete`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Complete {
    token: Uuid,
    #[serde(default)]
    result: Option<Box<RawValue>>,
}

/// The body of `fail`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Fail {
    token: Uuid,
    #[serde(default)]
    message: Option<String>,
    #[serde(default = "yes")]
    retry: bool,
    #[serde(default)]
    after: Option<String>,
}

/// The body of `heartbeat`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Heartbeat {
    token: Uuid,
    #[serde(default, rename = "for")]
    length: Option<String>,
}

const fn yes() -> bool {
    true
}

/// `POST /v1/jobs/{id}/complete`: success means that the database has it, now or since before.
pub(crate) async fn complete(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer {
    let id = read(id)?;
    let Complete { token, result } = said(&shared, body)?;
    let result = result.map(|result| result.get().to_owned());
    end(&shared, id, token, Said::Completed { result }).await
}

/// `POST /v1/jobs/{id}/fail`.
pub(crate) async fn fail(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer {
    let id = read(id)?;
    let Fail {
        token,
        message,
        retry,
        after,
    } = said(&shared, body)?;
    let failed = Said::Failed {
        message,
        retry,
        after,
    };
    end(&shared, id, token, failed).await
}

/// `POST /v1/jobs/{id}/heartbeat`: the handler is at work. The answer says for how long that was taken, and whether it should stop.
pub(crate) async fn heartbeat(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
    body: Result<Bytes, BytesRejection>,
) -> Answer {
    let id = read(id)?;
    let Heartbeat { token, length } = said(&shared, body)?;
    let kept = shared
        .completions
        .keep(&shared.db, id, token, length)
        .await?;
    let stop = kept.stop.as_deref().map(|stop| match stop {
        "cancel" => "cancelled",
        "complete" => "completed by hand",
        _ => "moved to the dead letters",
    });
    let data =
        serde_json::json!({"id": id, "held_for_seconds": kept.left.as_secs_f64(), "stop": stop});
    good(StatusCode::OK, &data)
}

async fn end(shared: &Shared, id: Uuid, token: Uuid, said: Said) -> Answer {
    shared.completions.end(&shared.db, id, token, said).await?;
    good(
        StatusCode::OK,
        &serde_json::json!({"id": id, "confirmed": true}),
    )
}

fn said<T: DeserializeOwned>(
    shared: &Shared,
    body: Result<Bytes, BytesRejection>,
) -> Result<T, Problem> {
    let body = body.map_err(|refused| too_large(&refused, shared.max_body))?;
    serde_json::from_slice(&body).map_err(|error| {
        Problem::input(format!("the body: {error}"))
            .hint("a JSON object with the `token` of the job's envelope is expected".to_owned())
    })
}

impl From<Refused> for Problem {
    fn from(refused: Refused) -> Self {
        let message = refused.to_string();
        match refused {
            Refused::Unknown(_) => Self::new(StatusCode::NOT_FOUND, "not_found", message),
            Refused::Stale(_) => Self::new(StatusCode::CONFLICT, "stale", message),
            Refused::Later(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "unconfirmed", message)
                .hint(AGAIN.to_owned()),
            Refused::Input(_) => Self::input(message),
            Refused::TooLong(..) => Self::new(StatusCode::PAYLOAD_TOO_LARGE, "too_large", message),
            // Another epoch, or a worker that is not known now: the database is being switched, which is over soon.
            Refused::Store(error @ (StoreError::OtherEpoch(_) | StoreError::DeadWorker(_))) => {
                Self::from(Refused::Later(error.to_string()))
            }
            Refused::Store(
                error @ (StoreError::Unreachable(_)
                | StoreError::Timeout(_)
                | StoreError::ReadOnly(_)
                | StoreError::Repeat(_)),
            ) => Self::from(error).hint(AGAIN.to_owned()),
            Refused::Store(error) => Self::from(error),
        }
    }
}
