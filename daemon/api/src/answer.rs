//! Every answer: one envelope, the same as the command line's JSON.

use axum::Json;
use axum::http::{HeaderName, HeaderValue, StatusCode, header};
use axum::response::{IntoResponse, Response};
use serde::Serialize;
use tenure_store::error::StoreError;

use crate::access::Denied;

/// What a program is told when it does not get what it asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Problem {
    status: StatusCode,
    code: &'static str,
    message: String,
    hint: Option<String>,
}

/// The result of a request.
pub(crate) type Answer = Result<Response, Problem>;

/// A good answer.
pub(crate) fn good(status: StatusCode, data: &impl Serialize) -> Answer {
    #[derive(Serialize)]
    struct Good<'a, T> {
        success: bool,
        data: &'a T,
        error: Option<()>,
    }
    let body = serde_json::to_vec(&Good {
        success: true,
        data,
        error: None,
    })
    .map_err(|error| {
        Problem::new(
            StatusCode::INTERNAL_SERVER_ERROR,
            "failed",
            error.to_string(),
        )
    })?;
    let mut response = body.into_response();
    *response.status_mut() = status;
    Ok(as_json(response))
}

impl Problem {
    pub(crate) fn new(status: StatusCode, code: &'static str, message: impl Into<String>) -> Self {
        Self {
            status,
            code,
            message: message.into(),
            hint: None,
        }
    }

    /// Something in the request is wrong.
    pub(crate) fn input(message: impl Into<String>) -> Self {
        Self::new(StatusCode::BAD_REQUEST, "input", message)
    }

    /// Adds what to do.
    pub(crate) fn hint(mut self, hint: impl Into<Option<String>>) -> Self {
        self.hint = hint.into();
        self
    }
}

impl IntoResponse for Problem {
    fn into_response(self) -> Response {
        #[derive(Serialize)]
        struct Bad {
            success: bool,
            data: Option<()>,
            error: Reason,
        }
        #[derive(Serialize)]
        struct Reason {
            code: &'static str,
            message: String,
            hint: Option<String>,
        }
        let error = Reason {
            code: self.code,
            message: self.message,
            hint: self.hint,
        };
        let body = Bad {
            success: false,
            data: None,
            error,
        };
        let mut response = as_json((self.status, Json(body)).into_response());
        if self.status == StatusCode::SERVICE_UNAVAILABLE {
            response
                .headers_mut()
                .insert(header::RETRY_AFTER, HeaderValue::from_static("2"));
        }
        if self.status == StatusCode::UNAUTHORIZED {
            response
                .headers_mut()
                .insert(header::WWW_AUTHENTICATE, HeaderValue::from_static("Bearer"));
        }
        response
    }
}

/// Says that a body is JSON and nothing else, and that nobody may keep it.
fn as_json(mut response: Response) -> Response {
    let headers = response.headers_mut();
    headers.insert(
        header::CONTENT_TYPE,
        HeaderValue::from_static("application/json"),
    );
    headers.insert(header::CACHE_CONTROL, HeaderValue::from_static("no-store"));
    headers.insert(
        HeaderName::from_static("x-content-type-options"),
        HeaderValue::from_static("nosniff"),
    );
    response
}

impl From<StoreError> for Problem {
    fn from(error: StoreError) -> Self {
        let message = error.to_string();
        match error {
            StoreError::Refused { code, hint, .. } => match code.as_str() {
                "TN005" => Self::new(StatusCode::NOT_FOUND, "not_found", message).hint(hint),
                "TN007" => Self::input(message).hint(hint),
                "TN002" => Self::new(StatusCode::SERVICE_UNAVAILABLE, "window", message).hint(hint),
                _ => Self::new(StatusCode::CONFLICT, "refused", message).hint(hint),
            },
            StoreError::BadValue(_) => Self::input(message),
            StoreError::OtherEpoch(_) | StoreError::DeadWorker(_) => Self::new(StatusCode::CONFLICT, "refused", message),
            StoreError::Unmigrated(_) => Self::new(StatusCode::SERVICE_UNAVAILABLE, "unmigrated", message),
            StoreError::Unreachable(_) | StoreError::Timeout(_) | StoreError::ReadOnly(_) | StoreError::Unreplicated(_) | StoreError::Repeat(_) => {
                Self::new(StatusCode::SERVICE_UNAVAILABLE, "unreachable", message).hint(
                    "try again; a job with an `id` of its own (UUIDv7) is put in once, however often it is sent".to_owned(),
                )
            }
            StoreError::Failed(_) => Self::new(StatusCode::INTERNAL_SERVER_ERROR, "failed", message),
        }
    }
}

impl From<Denied> for Problem {
    fn from(denied: Denied) -> Self {
        let (status, code) = match denied {
            Denied::Token => (StatusCode::UNAUTHORIZED, "unauthorized"),
            Denied::Host | Denied::CrossSite => (StatusCode::FORBIDDEN, "forbidden"),
            Denied::ContentType => (StatusCode::UNSUPPORTED_MEDIA_TYPE, "content_type"),
        };
        Self::new(status, code, denied.to_string())
    }
}
