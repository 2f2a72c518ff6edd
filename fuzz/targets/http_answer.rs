//! What an HTTP handler answers: status, headers and body, the body in any pieces or broken off.
//!
//! Input: lines `STATUS LIMIT PIECES`, headers, an empty line; then the body. A `!` after PIECES breaks the body off.
#![no_main]

use std::io;
use std::time::{Duration, SystemTime};

use axum::http::{HeaderName, HeaderValue};
use libfuzzer_sys::fuzz_target;
use reqwest::Body;
use tenure_fuzz::{assert_ended, collected, pieces};
use tenure_protocol::verdict::{Ended, Verdict, http_verdict, retry_after};
use tenure_protocol::webhook::Secret;
use tenure_runtime::exec::Limits;
use tenure_runtime::fuzzing;
use tokio::runtime::{Builder, Runtime};

/// The longest wait that a handler can ask for.
const DAY: Duration = Duration::from_secs(86_400);

thread_local! {
    static RUNTIME: Runtime = Builder::new_current_thread().enable_time().build().unwrap();
}

struct Answer<'a> {
    status: u16,
    limits: Limits,
    seed: u8,
    broken: bool,
    headers: Vec<(HeaderName, HeaderValue)>,
    body: &'a [u8],
}

fuzz_target!(|data: &[u8]| {
    let Some(answer) = read(data) else { return };
    let ended = answer.ended(pieces(answer.body, answer.seed));
    let whole = answer.ended([answer.body].into_iter());
    assert_eq!(ended.http_status, Some(answer.status));
    assert_ended(&ended);
    assert_eq!(ended, whole);
    assert_verdict(&answer, &ended);
    if let Ok(secret) =
        std::str::from_utf8(answer.body).map_or(Err(()), |text| Secret::parse(text).map_err(|_| ()))
    {
        assert!(secret.sign("id", 0, data).is_ascii());
    }
});

fn assert_verdict(answer: &Answer<'_>, ended: &Ended) {
    let header = answer
        .headers
        .iter()
        .find(|(name, _)| name == "retry-after");
    let asked = header
        .and_then(|(_, value)| value.to_str().ok())
        .and_then(|value| retry_after(value, SystemTime::UNIX_EPOCH));
    assert!(asked.is_none_or(|wait| wait <= DAY));
    let by_status = http_verdict(answer.status, asked);
    match ended.verdict {
        Verdict::Done | Verdict::Snooze(_) => {
            assert_eq!(by_status, Verdict::Done);
            // The same words mean the same from every kind of handler.
            if answer.body.len() <= answer.limits.result {
                assert!(!answer.broken);
                let output = collected(answer.limits.result, [answer.body].into_iter());
                assert_eq!(Ended::answered(&output).result, ended.result);
            }
        }
        Verdict::Retry { not_before, .. } => {
            assert!(not_before.is_none_or(|wait| wait <= DAY));
            assert!(by_status != Verdict::Dead);
        }
        Verdict::Dead => assert_eq!(by_status, Verdict::Dead),
        Verdict::Held => assert_eq!(by_status, Verdict::Held),
        Verdict::Stopped | Verdict::Crashed => unreachable!("nobody has stopped it"),
    }
}

impl Answer<'_> {
    fn ended<'a>(&self, chunks: impl Iterator<Item = &'a [u8]>) -> Ended {
        let mut body: Vec<io::Result<Vec<u8>>> = chunks.map(|chunk| Ok(chunk.to_vec())).collect();
        if self.broken {
            body.push(Err(io::Error::other("the connection was reset")));
        }
        let body = Body::wrap_stream(futures_util::stream::iter(body));
        let mut response = axum::http::Response::new(body);
        *response.status_mut() = self.status.try_into().unwrap();
        for (name, value) in &self.headers {
            response.headers_mut().append(name, value.clone());
        }
        let answer = fuzzing::http_answer(self.limits, response.into());
        RUNTIME.with(|runtime| runtime.block_on(answer))
    }
}

fn read(data: &[u8]) -> Option<Answer<'_>> {
    let at = data.windows(2).position(|window| window == b"\n\n")?;
    let (head, body) = (&data[..at], &data[at + 2..]);
    let mut lines = head.split(|byte| *byte == b'\n');
    let first = std::str::from_utf8(lines.next()?).ok()?;
    let mut words = first.split(' ');
    let status: u16 = words.next()?.parse().ok()?;
    let limit = words.next()?.parse().ok()?;
    let seed = words.next()?.parse().ok()?;
    let headers = lines.filter_map(|line| {
        let colon = line.iter().position(|byte| *byte == b':')?;
        let name = HeaderName::from_bytes(&line[..colon]).ok()?;
        let value = HeaderValue::from_bytes(line[colon + 1..].trim_ascii()).ok()?;
        Some((name, value))
    });
    let limits = Limits {
        result: limit,
        log: limit,
    };
    (100..=999).contains(&status).then(|| Answer {
        status,
        limits,
        seed,
        broken: words.next() == Some("!"),
        headers: headers.collect(),
        body,
    })
}
