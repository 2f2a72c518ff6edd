//! `/v1/jobs`: put in, list, show, cancel, retry.

use axum::body::Bytes;
use axum::extract::rejection::{BytesRejection, PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use axum::http::StatusCode;
use serde::Deserialize;
use serde_json::value::RawValue;
use tenure_store::view::{JobFilter, STATUSES};
use uuid::Uuid;

use crate::answer::{Answer, Problem, good};
use crate::state::Shared;

/// Who acts, for the record.
const BY: &str = "api";

/// `POST /v1/jobs`: one job or an array of them, all or none.
pub(crate) async fn enqueue(
    State(shared): State<Shared>,
    body: Result<Bytes, BytesRejection>,
) -> Answer {
    let body = body.map_err(|refused| too_large(&refused, shared.max_body))?;
    let text = std::str::from_utf8(&body).map_err(|_| Problem::input("the body is not UTF-8"))?;
    let value: &RawValue = serde_json::from_str(text)
        .map_err(|error| Problem::input(format!("the body is no JSON: {error}")))?;
    let one = match value.get().as_bytes().first() {
        Some(b'{') => true,
        Some(b'[') => false,
        _ => {
            return Err(Problem::input(
                "a job (an object) or an array of jobs is expected",
            ));
        }
    };
    let jobs = if one {
        format!("[{}]", value.get())
    } else {
        value.get().to_owned()
    };
    // Only that connection notices a commit that did not wait for its standby. A job whose data has the word waits its turn there too.
    let ids = if jobs.contains("\"durability\"") {
        shared.db.careful().await?.enqueue_many(&jobs).await?
    } else {
        shared.db.session().await?.enqueue_many(&jobs).await?
    };
    let data = match ids.as_slice() {
        [id] if one => serde_json::json!({"id": id, "ids": [id]}),
        ids => serde_json::json!({"ids": ids}),
    };
    good(StatusCode::CREATED, &data)
}

/// What `GET /v1/jobs` may be asked for.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct ListQuery {
    status: Option<String>,
    #[serde(rename = "type")]
    job_type: Option<String>,
    tenant: Option<String>,
    limit: Option<i64>,
    cursor: Option<Uuid>,
}

/// `GET /v1/jobs`: a page of jobs without data and results, the newest first, and the cursor of the next page.
pub(crate) async fn list(
    State(shared): State<Shared>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Answer {
    let Query(query) = query.map_err(|refused| Problem::input(refused.body_text()))?;
    let limit = query.limit.unwrap_or(50);
    if !(1..=1000).contains(&limit) {
        return Err(Problem::input("limit must be from 1 to 1000"));
    }
    if let Some(status) = query
        .status
        .as_deref()
        .filter(|status| !STATUSES.contains(status))
    {
        return Err(Problem::input(format!(
            "status {status:?} is none of {}",
            STATUSES.join(", ")
        )));
    }
    let filter = JobFilter {
        status: query.status,
        job_type: query.job_type,
        tenant: query.tenant,
        before: query.cursor,
        limit,
    };
    let session = shared.db.session().await?;
    let jobs = session.jobs(&filter).await?;
    let full = i64::try_from(jobs.len()).is_ok_and(|count| count == limit);
    let cursor = jobs.last().filter(|_| full).map(|job| job.id);
    good(
        StatusCode::OK,
        &serde_json::json!({"jobs": jobs, "cursor": cursor}),
    )
}

/// `GET /v1/jobs/{id}`: everything about one job; data and result as PostgreSQL gives them.
pub(crate) async fn show(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
) -> Answer {
    let id = read(id)?;
    let session = shared.db.session().await?;
    good(StatusCode::OK, &session.job(id).await?)
}

/// `POST /v1/jobs/{id}/cancel`.
pub(crate) async fn cancel(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
) -> Answer {
    let id = read(id)?;
    let session = shared.db.session().await?;
    let status = session.cancel_job(id, None, BY).await?;
    good(
        StatusCode::OK,
        &serde_json::json!({"id": id, "status": status}),
    )
}

/// `POST /v1/jobs/{id}/retry`.
pub(crate) async fn retry(
    State(shared): State<Shared>,
    id: Result<Path<Uuid>, PathRejection>,
) -> Answer {
    let id = read(id)?;
    let session = shared.db.session().await?;
    let status = session.retry_job(id, BY).await?;
    good(
        StatusCode::OK,
        &serde_json::json!({"id": id, "status": status}),
    )
}

pub(crate) fn read(id: Result<Path<Uuid>, PathRejection>) -> Result<Uuid, Problem> {
    id.map(|Path(id)| id)
        .map_err(|_| Problem::input("the id of a job is a UUID"))
}

pub(crate) fn too_large(refused: &BytesRejection, most: usize) -> Problem {
    match refused.status() {
        StatusCode::PAYLOAD_TOO_LARGE => Problem::new(
            StatusCode::PAYLOAD_TOO_LARGE,
            "too_large",
            format!("the body is longer than {most} bytes (api.max_body)"),
        ),
        _ => Problem::input(format!(
            "the body could not be read: {}",
            refused.body_text()
        )),
    }
}
