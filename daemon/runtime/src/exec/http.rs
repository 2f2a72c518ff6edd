//! One attempt as an HTTP request to a handler that runs elsewhere.
//!
//! Invariants: a request is sent once (a connection that is found closed before anything was sent is replaced by the client; one
//! that closes later fails the attempt, since the receiver may have begun);
//! redirects are not followed; no error holds the query or the user of the address, or a secret.

use std::error::Error as _;
use std::path::PathBuf;
use std::time::{Duration, SystemTime};

use reqwest::header::{
    ACCEPT_ENCODING, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue, RETRY_AFTER,
};
use reqwest::{Client, Response, Url};
use tenure_protocol::envelope::Envelope;
use tenure_protocol::output::Output;
use tenure_protocol::verdict::{Ended, Verdict, explained, http_verdict, retry_after};
use tenure_protocol::webhook::{Secret, SecretError, sign_all};
use tokio::time::{Instant, timeout_at};

use super::client::{Clients, NotAllowed, check_host};
use super::{Executor, Limits, StopSignal, Task, after, next_order, stopped};
use crate::settings::HttpSettings;

/// How long the body of an answer that is no success is read.
const EXPLANATION: Duration = Duration::from_secs(5);

/// Why an HTTP handler cannot be made ready.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    /// The address is none.
    #[error(
        "the url of an http handler cannot be used: {0}; expected http://host:port/path or https://…"
    )]
    Url(String),
    /// A header is none.
    #[error(
        "the header {0:?} of an http handler cannot be sent; names are letters, digits and -, values have no line break"
    )]
    Header(String),
    /// A header that is not for settings.
    #[error("the header {0:?} of an http handler cannot be set: tenure sets it with each request")]
    Reserved(String),
    /// The secret is none.
    #[error(transparent)]
    Secret(#[from] SecretError),
    /// The authorities are none.
    #[error("{} {why}; a file of certificates in PEM is expected", file.display())]
    Authorities {
        /// The file.
        file: PathBuf,
        /// What is wrong with it.
        why: String,
    },
    /// It may not be reached.
    #[error("the url of an http handler cannot be used: {0}")]
    NotAllowed(String),
    /// The client could not be made.
    #[error("the HTTP client cannot be made: {0}")]
    Client(String),
}

/// An HTTP handler that is ready to be called.
#[derive(Debug, Clone)]
pub struct HttpHandler {
    client: Client,
    url: Url,
    headers: HeaderMap,
    secrets: Vec<Secret>,
    body_timeout: Option<Duration>,
    max_response: usize,
    max_headers: usize,
    callback: Option<String>,
    /// Whom a certificate was checked against, for errors.
    trusted: String,
}

impl HttpHandler {
    /// Makes ready what the settings describe.
    ///
    /// # Errors
    /// When its address, a header or its secret cannot be used.
    pub fn new(settings: &HttpSettings, clients: &mut Clients) -> Result<Self, PrepareError> {
        let url = Url::parse(settings.url.expose())
            .map_err(|error| PrepareError::Url(error.to_string()))?;
        if !matches!(url.scheme(), "http" | "https") || !url.has_host() {
            return Err(PrepareError::Url(format!(
                "the scheme is {:?}",
                url.scheme()
            )));
        }
        let mut headers = HeaderMap::new();
        for (name, value) in &settings.headers {
            let bad = || PrepareError::Header(name.clone());
            let mut value = HeaderValue::from_str(value.expose()).map_err(|_| bad())?;
            value.set_sensitive(true);
            let header = HeaderName::try_from(name).map_err(|_| bad())?;
            if is_reserved(&header) {
                return Err(PrepareError::Reserved(name.clone()));
            }
            headers.insert(header, value);
        }
        let secrets = settings
            .secret
            .as_ref()
            .map(|secret| Secret::parse_all(secret.expose()));
        if settings.socket.is_none() {
            check_host(&url, &settings.allow)
                .map_err(|error| PrepareError::NotAllowed(error.to_string()))?;
        }
        Ok(Self {
            client: clients.of(settings)?,
            url,
            headers,
            secrets: secrets.transpose()?.unwrap_or_default(),
            body_timeout: settings.body_timeout,
            max_response: settings.max_response,
            max_headers: settings.max_headers,
            callback: settings.callback.clone(),
            trusted: match &settings.authorities {
                Some(authorities) => format!("the authorities in {}", authorities.file.display()),
                None => "the system's authorities".to_owned(),
            },
        })
    }

    /// The address for people: without user, password and query.
    fn address(&self) -> String {
        let port = self
            .url
            .port()
            .map_or_else(String::new, |port| format!(":{port}"));
        let host = self.url.host_str().unwrap_or_default();
        format!("{}://{host}{port}{}", self.url.scheme(), self.url.path())
    }

    /// No answer came.
    fn failed(&self, address: &str, error: reqwest::Error) -> Ended {
        let reached = !error.is_connect();
        let refused = source::<NotAllowed>(&error).is_some();
        let certificate = source::<rustls::Error>(&error)
            .is_some_and(|error| matches!(error, rustls::Error::InvalidCertificate(_)));
        let mut why = format!("no answer from {address}: {}", chain(error));
        if certificate {
            why = format!("{why} (checked against {})", self.trusted);
        }
        let verdict = match refused || certificate {
            true => Verdict::RETRY_LONG,
            false => Verdict::RETRY,
        };
        Ended {
            reached,
            ..Ended::because(verdict, why)
        }
    }

    fn headers(
        &self,
        task: &Task,
        deadline: &str,
        body: &str,
        callback: Option<&str>,
    ) -> HeaderMap {
        let job = task.job.to_string();
        let mut headers = self.headers.clone();
        let mut add = |name, value: &str| {
            headers.insert(HeaderName::from_static(name), header_value(value));
        };
        add(CONTENT_TYPE.as_str(), "application/json");
        // A body in its own bytes has the length that the limit is about.
        add(ACCEPT_ENCODING.as_str(), "identity");
        add("tenure-job-id", &job);
        add("tenure-job-type", &task.job_type);
        add("tenure-attempt", &task.attempt.to_string());
        add("tenure-token", &task.token.to_string());
        add("tenure-deadline", deadline);
        add("idempotency-key", &job);
        if let Some(callback) = callback {
            add("tenure-callback", callback);
        }
        if let Some(traceparent) = &task.traceparent {
            add("traceparent", traceparent);
        }
        if !self.secrets.is_empty() {
            let timestamp = wall_clock()
                .duration_since(SystemTime::UNIX_EPOCH)
                .unwrap_or_default()
                .as_secs();
            add("webhook-id", &job);
            add("webhook-timestamp", &timestamp.to_string());
            add(
                "webhook-signature",
                &sign_all(&self.secrets, &job, timestamp, body.as_bytes()),
            );
        }
        headers
    }
}

/// Runs one attempt as a request. A word to stop closes the connection.
pub(super) async fn run(
    executor: &Executor,
    handler: &HttpHandler,
    task: &Task,
    mut stop: StopSignal,
) -> Ended {
    tokio::select! {
        biased;
        (_, reason) = next_order(&mut stop) => stopped(&reason),
        ended = call(executor, handler, task) => ended,
    }
}

async fn call(executor: &Executor, handler: &HttpHandler, task: &Task) -> Ended {
    let address = handler.address();
    let until = after(task.timeout);
    let deadline = task.deadline();
    let callback = handler
        .callback
        .as_ref()
        .map(|before| format!("{before}{}", task.job));
    let envelope = Envelope {
        callback: callback.as_deref(),
        ..task.envelope(&deadline)
    };
    let body = envelope.to_json();
    let headers = handler.headers(task, &deadline, &body, callback.as_deref());
    let request = handler
        .client
        .post(handler.url.clone())
        .headers(headers)
        .body(body);
    let no_answer =
        |why: &str| Ended::because(Verdict::RETRY, format!("no answer from {address}{why}"));
    match timeout_at(until, request.send()).await {
        Ok(Ok(response)) => {
            let limits = Limits {
                result: executor.limits.result.min(handler.max_response),
                ..executor.limits
            };
            let until = handler
                .body_timeout
                .map_or(until, |body| until.min(after(body)));
            let headers = size(response.headers());
            if headers > handler.max_headers {
                return no_answer(&format!(
                    ": its headers have {headers} bytes; at most {} are taken (max_headers)",
                    handler.max_headers
                ));
            }
            answered(limits, &address, response, until).await
        }
        Ok(Err(error)) => handler.failed(&address, error),
        Err(_) => no_answer(&format!(
            " within {}",
            humantime::format_duration(task.timeout)
        )),
    }
}

/// What the answer from `address` means; its body is read until then.
pub(crate) async fn answered(
    limits: Limits,
    address: &str,
    mut response: Response,
    until: Instant,
) -> Ended {
    let status = response.status();
    let asked = response
        .headers()
        .get(RETRY_AFTER)
        .and_then(|value| value.to_str().ok());
    let verdict = http_verdict(
        status.as_u16(),
        asked.and_then(|value| retry_after(value, wall_clock())),
    );
    let (limit, until) = match verdict {
        Verdict::Done => (limits.result, until),
        // The status has said it; the body only explains.
        _ => (limits.log, until.min(after(EXPLANATION))),
    };
    let (output, broken) = read(&mut response, limit, until).await;

    let what = format!("HTTP {status} from {address}");
    let ended = match (verdict, broken) {
        (Verdict::Done, None) => Ended::answered(&output),
        (Verdict::Done, Some(why)) => Ended::because(
            Verdict::RETRY,
            format!("{what}, but the answer broke off: {why}"),
        ),
        (Verdict::Held, _) => Ended::new(Verdict::Held),
        (verdict, _) => {
            let said = output.text();
            let first_line = said
                .as_deref()
                .and_then(|said| said.lines().map(str::trim).find(|line| !line.is_empty()));
            Ended::because(verdict, explained(&what, first_line))
        }
    };
    Ended {
        http_status: Some(status.as_u16()),
        log_tail: ended.error.as_ref().and_then(|_| output.tail(limits.log)),
        ..ended
    }
}

/// How many bytes these headers have.
fn size(headers: &HeaderMap) -> usize {
    let each = headers.iter();
    each.map(|(name, value)| name.as_str().len() + value.len())
        .sum()
}

/// How the request is framed, and what it says of the job.
fn is_reserved(header: &HeaderName) -> bool {
    const NAMES: [&str; 10] = [
        "accept-encoding",
        "connection",
        "content-length",
        "content-type",
        "expect",
        "idempotency-key",
        "te",
        "traceparent",
        "transfer-encoding",
        "upgrade",
    ];
    let name = header.as_str();
    NAMES.contains(&name) || name.starts_with("tenure-") || name.starts_with("webhook-")
}

/// The body up to `limit` bytes, and why it broke off before its end if it did. What is longer is not read.
async fn read(response: &mut Response, limit: usize, until: Instant) -> (Output, Option<String>) {
    let mut output = Output {
        complete: true,
        ..Output::default()
    };
    loop {
        let chunk = match timeout_at(until, response.chunk()).await {
            Ok(Ok(Some(chunk))) => chunk,
            Ok(Ok(None)) => return (output, None),
            Ok(Err(error)) => return (output, Some(chain(error))),
            Err(_) => return (output, Some("it took too long".to_owned())),
        };
        let room = limit - output.bytes.len();
        output
            .bytes
            .extend_from_slice(&chunk[..chunk.len().min(room)]);
        if chunk.len() > room {
            output
                .bytes
                .extend_from_slice("… [tenure: the rest was not read] …".as_bytes());
            return (Output::beginning(output.bytes), None);
        }
    }
}

/// `value` as a header: what is not visible ASCII is percent-encoded, so that a job type in any script can be sent.
fn header_value(value: &str) -> HeaderValue {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        match byte {
            b' '..=b'~' if byte != b'%' => encoded.push(char::from(byte)),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    #[expect(clippy::expect_used, reason = "every byte was made visible above")]
    let value = HeaderValue::try_from(encoded).expect("every byte was made visible above");
    value
}

/// An error with its causes and without the address, whose query may be a secret.
pub(super) fn chain(error: reqwest::Error) -> String {
    let error = error.without_url();
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        text = format!("{text}: {error}");
        cause = error.source();
    }
    text
}

/// The error of this type among the causes.
fn source<'e, T: std::error::Error + 'static>(
    error: &'e (dyn std::error::Error + 'static),
) -> Option<&'e T> {
    let mut cause = Some(error);
    while let Some(error) = cause {
        if let Some(found) = error.downcast_ref() {
            return Some(found);
        }
        // What was packed into an I/O error is not among its causes.
        let packed = error
            .downcast_ref::<std::io::Error>()
            .and_then(std::io::Error::get_ref);
        cause = match packed {
            Some(packed) => Some(packed),
            None => error.source(),
        };
    }
    None
}

#[expect(
    clippy::disallowed_methods,
    reason = "for the signature and for dates that the other side names"
)]
fn wall_clock() -> SystemTime {
    SystemTime::now()
}
