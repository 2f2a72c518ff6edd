//! Requests to a receiver that does as it is told.

use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tenure_protocol::verdict::{Ended, Verdict};
use tenure_runtime::exec::{Clients, Handler, Stop, Task};
use tenure_runtime::settings::{HandlerKind, HttpSettings, Secret};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;

use super::{BOUND, executor, run_task, task, within};

/// What the receiver does with a request once it has read it whole.
#[derive(Clone)]
pub(super) enum Script {
    /// Answers with this text, then closes.
    Answer(String),
    /// Answers with a head and then a body without end.
    Endless(&'static str),
    /// Answers with this beginning, and no more for as long as the connection stands.
    Stalling(&'static str),
    /// Keeps the connection and says nothing.
    Silent,
}

/// A receiver on a port of its own and the requests that it has read.
pub(super) struct Receiver {
    pub(super) address: SocketAddr,
    requests: Arc<Mutex<Vec<String>>>,
}

impl Receiver {
    pub(super) async fn start(script: Script) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let requests = Arc::new(Mutex::new(Vec::new()));
        let seen = Arc::clone(&requests);
        tokio::spawn(async move {
            while let Ok((stream, _)) = listener.accept().await {
                tokio::spawn(serve(stream, script.clone(), Arc::clone(&seen)));
            }
        });
        Self { address, requests }
    }

    pub(super) async fn answering(status: &str, headers: &str, body: &str) -> Self {
        let length = body.len();
        Self::start(Script::Answer(format!(
            "HTTP/1.1 {status}\r\nContent-Length: {length}\r\n{headers}\r\n{body}"
        )))
        .await
    }

    fn handler(&self) -> Handler {
        prepare(settings(&format!(
            "http://user:hunter2@{}/jobs?key=hunter2",
            self.address
        )))
    }

    async fn run(&self) -> Ended {
        run_task(&executor(), &self.handler(), &task("{}")).await
    }

    pub(super) fn requests(&self) -> Vec<String> {
        self.requests.lock().unwrap().clone()
    }
}

async fn serve(mut stream: TcpStream, script: Script, requests: Arc<Mutex<Vec<String>>>) {
    let mut bytes = Vec::new();
    let whole = |bytes: &[u8]| -> bool {
        let text = String::from_utf8_lossy(bytes);
        let Some((head, body)) = text.split_once("\r\n\r\n") else {
            return false;
        };
        let length = head
            .lines()
            .find_map(|line| line.strip_prefix("content-length: "));
        body.len() >= length.map_or(0, |length| length.parse().unwrap())
    };
    while !whole(&bytes) {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return;
        }
    }
    requests
        .lock()
        .unwrap()
        .push(String::from_utf8(bytes).unwrap());
    match script {
        Script::Answer(text) => drop(stream.write_all(text.as_bytes()).await),
        Script::Endless(head) => {
            let _ = stream.write_all(head.as_bytes()).await;
            while stream.write_all(&[b'x'; 65536]).await.is_ok() {}
        }
        Script::Stalling(beginning) => {
            let _ = stream.write_all(beginning.as_bytes()).await;
            drop(stream.read(&mut [0]).await);
        }
        Script::Silent => drop(stream.read(&mut [0]).await),
    }
}

pub(super) fn settings(url: &str) -> HttpSettings {
    HttpSettings {
        timeout: BOUND,
        ..HttpSettings::at(url)
    }
}

pub(super) fn prepare(settings: HttpSettings) -> Handler {
    Handler::prepare(
        "report",
        &HandlerKind::Http(settings),
        &mut Clients::default(),
    )
    .unwrap()
}

#[tokio::test]
async fn the_request_is_the_one_of_the_contract() {
    let receiver = Receiver::answering("200 OK", "", r#"{"rows":18446744073709551616}"#).await;
    let mut settings = settings(&format!("http://{}/jobs", receiver.address));
    settings.secret = Some(Secret::new("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"));
    settings
        .headers
        .insert("Authorization".to_owned(), Secret::new("Bearer x"));
    settings.callback = Some("http://tenure/v1/jobs/".to_owned());
    let task = Task {
        job_type: "报告%".to_owned(),
        traceparent: Some("00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".to_owned()),
        ..task(r#"{"n": 18446744073709551616}"#)
    };
    let ended = run_task(&executor(), &prepare(settings), &task).await;
    assert_eq!(
        (ended.verdict, ended.http_status),
        (Verdict::Done, Some(200))
    );
    assert_eq!(ended.result.unwrap(), r#"{"rows":18446744073709551616}"#);

    let requests = receiver.requests();
    let (head, body) = requests[0].split_once("\r\n\r\n").unwrap();
    let header = |name: &str| {
        let mut lines = head.lines().filter_map(|line| line.split_once(": "));
        lines
            .find(|(key, _)| *key == name)
            .map(|(_, value)| value.to_owned())
            .unwrap_or_else(|| panic!("{name}: {head}"))
    };
    assert!(head.starts_with("POST /jobs HTTP/1.1"));
    assert_eq!(header("tenure-job-id"), task.job.to_string());
    assert_eq!(header("idempotency-key"), task.job.to_string());
    assert_eq!(header("webhook-id"), task.job.to_string());
    assert_eq!(header("tenure-job-type"), "%E6%8A%A5%E5%91%8A%25");
    let callback = format!("http://tenure/v1/jobs/{}", task.job);
    assert_eq!(header("tenure-callback"), callback);
    assert!(body.contains(&format!(r#""callback":"{callback}""#)));
    assert_eq!(header("tenure-attempt"), "2");
    assert_eq!(header("tenure-token"), task.token.to_string());
    assert_eq!(header("traceparent"), task.traceparent.unwrap());
    assert_eq!(header("authorization"), "Bearer x");
    assert_eq!(header("content-type"), "application/json");
    assert_eq!(header("accept-encoding"), "identity");
    let secret =
        tenure_protocol::webhook::Secret::parse("whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw").unwrap();
    let timestamp = header("webhook-timestamp").parse().unwrap();
    assert_eq!(
        header("webhook-signature"),
        secret.sign(&task.job.to_string(), timestamp, body.as_bytes())
    );
    assert!(body.contains(r#""data":{"n": 18446744073709551616}"#));
    assert!(body.contains(&header("tenure-deadline")));
}

/// B85.
#[tokio::test]
async fn each_status_has_its_verdict() {
    let cases = [
        ("201 Created", Verdict::Done),
        ("301 Moved Permanently", Verdict::RETRY),
        ("307 Temporary Redirect", Verdict::RETRY),
        ("400 Bad Request", Verdict::Dead),
        ("404 Not Found", Verdict::RETRY_LONG),
        ("409 Conflict", Verdict::RETRY_LONG),
        ("410 Gone", Verdict::Dead),
        ("422 Unprocessable Entity", Verdict::Dead),
        ("500 Internal Server Error", Verdict::RETRY),
    ];
    for (status, verdict) in cases {
        let receiver = Receiver::answering(status, "Location: /elsewhere\r\n", "why\nmore").await;
        let ended = receiver.run().await;
        assert_eq!(ended.verdict, verdict, "{status}");
        assert_eq!(
            receiver.requests().len(),
            1,
            "{status}: nothing is followed or sent again"
        );
        if verdict != Verdict::Done {
            let error = ended.error.unwrap();
            assert!(
                error.contains(status) && !error.contains("hunter2"),
                "{error}"
            );
            assert_eq!(ended.log_tail.as_deref(), Some("why\nmore"));
        }
    }
}

/// B70.
#[tokio::test]
async fn retry_after_is_honoured() {
    let asked = |seconds| Verdict::Retry {
        not_before: Some(Duration::from_secs(seconds)),
        long: false,
    };
    let ended = Receiver::answering("429 Too Many Requests", "Retry-After: 20\r\n", "")
        .await
        .run()
        .await;
    assert_eq!(ended.verdict, asked(20));
    let ended = Receiver::answering(
        "503 Service Unavailable",
        "Retry-After: Sun, 06 Nov 1994 08:49:37 GMT\r\n",
        "",
    )
    .await
    .run()
    .await;
    assert_eq!(ended.verdict, asked(0));
    let ended = Receiver::answering("503 Service Unavailable", "Retry-After: soon\r\n", "")
        .await
        .run()
        .await;
    assert_eq!(ended.verdict, Verdict::RETRY);
}

/// B84: reading stops at the limit, and the status decides.
#[tokio::test]
async fn endless_bodies_are_cut() {
    let ended = Receiver::start(Script::Endless("HTTP/1.1 200 OK\r\n\r\n"))
        .await
        .run()
        .await;
    assert_eq!(ended.verdict, Verdict::Done);
    let result = ended.result.unwrap();
    assert!(
        result.ends_with("xx… [tenure: the rest was not read] …\"") && result.len() < 65 * 1024
    );
    let ended = Receiver::start(Script::Endless("HTTP/1.1 422 No\r\n\r\n"))
        .await
        .run()
        .await;
    assert_eq!(ended.verdict, Verdict::Dead);
    assert!(ended.error.unwrap().len() < 1000);
}

#[tokio::test]
async fn a_success_that_breaks_off_is_none() {
    let half =
        Script::Answer("HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{\"half\":".to_owned());
    let ended = Receiver::start(half).await.run().await;
    assert_eq!(
        (ended.verdict, ended.http_status),
        (Verdict::RETRY, Some(200))
    );
    assert!(ended.error.unwrap().contains("broke off"));
}

#[tokio::test]
async fn no_answer_is_tried_again_and_told_without_secrets() {
    let closing = Receiver::start(Script::Answer(String::new())).await;
    let ended = closing.run().await;
    assert_eq!((ended.verdict, ended.http_status), (Verdict::RETRY, None));
    let error = ended.error.unwrap();
    assert!(
        error.contains(&format!("http://{}/jobs", closing.address)) && !error.contains("hunter2"),
        "{error}"
    );
    assert_eq!(closing.requests().len(), 1);

    let free = std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap();
    let ended = run_task(
        &executor(),
        &prepare(settings(&format!("http://{free}/?k=hunter2"))),
        &task("{}"),
    )
    .await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    let error = ended.error.unwrap();
    assert!(
        error.contains("refused") && !error.contains("hunter2"),
        "{error}"
    );
}

#[tokio::test]
async fn a_silent_receiver_times_out_and_a_stop_closes_the_call() {
    let receiver = Receiver::start(Script::Silent).await;
    let hurried = Task {
        timeout: Duration::from_millis(200),
        ..task("{}")
    };
    let ended = run_task(&executor(), &receiver.handler(), &hurried).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    assert!(ended.error.unwrap().ends_with("within 200ms"));

    let (stop, signal) = watch::channel(Stop::No);
    let (handler, executor, task) = (receiver.handler(), executor(), task("{}"));
    let stopping = async {
        super::until(|| receiver.requests().len() == 2).await;
        stop.send_replace(Stop::Kill {
            grace: BOUND,
            reason: "lease lost".to_owned(),
        });
    };
    let (ended, ()) =
        within(async { tokio::join!(executor.run(&handler, &task, signal), stopping) }).await;
    assert_eq!(ended.verdict, Verdict::Stopped);
}

#[tokio::test]
async fn settings_that_cannot_work_are_refused() {
    let refused = |settings: HttpSettings| {
        let refused = Handler::prepare(
            "report",
            &HandlerKind::Http(settings),
            &mut Clients::default(),
        );
        refused.unwrap_err().to_string()
    };
    assert!(refused(settings("ftp://host/")).contains("ftp"));
    assert!(refused(settings("nonsense")).contains("expected http"));
    let mut bad = settings("http://host/");
    bad.headers.insert("a b".to_owned(), Secret::new("x"));
    assert!(refused(bad).contains("\"a b\""));
    let mut bad = settings("http://host/");
    bad.secret = Some(Secret::new("whsec_!"));
    assert!(refused(bad).contains("base64"));
}
