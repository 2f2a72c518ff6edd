//! How the connection to a receiver is made, whom it trusts, and what bounds an answer.

use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use tenure_protocol::verdict::{Ended, Verdict};
use tenure_runtime::exec::{Clients, Handler};
use tenure_runtime::settings::{Authorities, HandlerKind, HttpSettings, Secret};
use tokio::io::{AsyncRead, AsyncReadExt as _, AsyncWrite, AsyncWriteExt as _};
use tokio::net::{TcpListener, UnixListener};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::pki_types::pem::PemObject as _;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};

use super::http::{Receiver, Script, prepare, settings};
use super::{executor, run_task, task};

async fn run(settings: HttpSettings) -> Ended {
    run_task(&executor(), &prepare(settings), &task("{}")).await
}

/// Reads a request with a short body and answers it.
async fn answer_one(stream: &mut (impl AsyncRead + AsyncWrite + Unpin)) -> bool {
    let mut bytes = Vec::new();
    while !bytes.ends_with(b"}") {
        if stream.read_buf(&mut bytes).await.unwrap_or(0) == 0 {
            return false;
        }
    }
    let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}";
    stream.write_all(answer).await.is_ok()
}

#[tokio::test]
async fn a_receiver_on_a_unix_socket_gets_jobs() {
    let dir = tempfile::tempdir().unwrap();
    let socket = dir.path().join("app.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        answer_one(&mut stream).await;
    });
    let over = |socket: &Path| HttpSettings {
        socket: Some(socket.to_owned()),
        ..settings("http://localhost/jobs")
    };
    assert_eq!(run(over(&socket)).await.verdict, Verdict::Done);
    let ended = run(over(&dir.path().join("none"))).await;
    assert!(!ended.reached);
    let error = ended.error.unwrap();
    assert!(error.contains("No such file"), "{error}");
}

#[tokio::test]
async fn a_request_is_signed_with_the_new_secret_and_the_old_one() {
    let receiver = Receiver::answering("200 OK", "", "").await;
    let mut both = settings(&format!("http://{}/jobs", receiver.address));
    both.secret = Some(Secret::new("new\nold\n"));
    assert_eq!(run(both).await.verdict, Verdict::Done);
    let requests = receiver.requests();
    let signature = requests[0]
        .lines()
        .find_map(|line| line.strip_prefix("webhook-signature: "));
    let each: Vec<&str> = signature.unwrap().split(' ').collect();
    assert!(each.len() == 2 && each.iter().all(|one| one.starts_with("v1,")));
    assert_ne!(each[0], each[1]);
}

/// A name leads where it leads at the moment of the connection, and that is what is looked at.
#[tokio::test]
async fn a_name_that_leads_outside_of_the_allow_list_is_not_connected_to() {
    let receiver = Receiver::answering("200 OK", "", "").await;
    let to = |allow: &str| HttpSettings {
        allow: vec![allow.parse().unwrap()],
        ..settings(&format!("http://localhost:{}/", receiver.address.port()))
    };
    let ended = run(to("10.0.0.0/8")).await;
    assert_eq!((ended.verdict, ended.reached), (Verdict::RETRY_LONG, false));
    let error = ended.error.unwrap();
    assert!(
        error.contains("localhost is at") && error.contains("`allow` does not name"),
        "{error}"
    );
    assert!(receiver.requests().is_empty());
    assert_eq!(run(to("127.0.0.0/8")).await.verdict, Verdict::Done);

    let numbers = HttpSettings {
        allow: vec!["10.0.0.0/8".parse().unwrap()],
        ..settings(&format!("http://{}/", receiver.address))
    };
    let refused = Handler::prepare("a", &HandlerKind::Http(numbers), &mut Clients::default());
    assert!(refused.unwrap_err().to_string().contains("127.0.0.1"));
}

/// B98.
#[tokio::test]
async fn a_private_authority_is_trusted_and_an_unknown_one_is_named() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| dir.path().join(name);
    let openssl = |arguments: &str| {
        let said = Command::new("openssl")
            .args(arguments.split(' '))
            .current_dir(dir.path())
            .output()
            .unwrap();
        assert!(said.status.success(), "{said:?}");
    };
    for name in ["one", "other"] {
        openssl(&format!(
            "req -x509 -newkey rsa:2048 -nodes -days 2 -subj /CN={name} -keyout {name}.key -out {name}.crt"
        ));
    }
    openssl(
        "req -newkey rsa:2048 -nodes -subj /CN=receiver -keyout receiver.key -out receiver.csr",
    );
    std::fs::write(file("receiver.ext"), "subjectAltName=IP:127.0.0.1\n").unwrap();
    openssl(
        "x509 -req -in receiver.csr -CA one.crt -CAkey one.key -CAcreateserial -days 2 -extfile receiver.ext -out receiver.crt",
    );
    let _ = rustls::crypto::ring::default_provider().install_default();
    let certificate = CertificateDer::from_pem_file(file("receiver.crt")).unwrap();
    let key = PrivateKeyDer::from_pem_file(file("receiver.key")).unwrap();
    let config = ServerConfig::builder()
        .with_no_client_auth()
        .with_single_cert(vec![certificate], key)
        .unwrap();
    let acceptor = TlsAcceptor::from(Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    tokio::spawn(async move {
        while let Ok((stream, _)) = listener.accept().await {
            if let Ok(mut stream) = acceptor.accept(stream).await {
                answer_one(&mut stream).await;
            }
        }
    });
    let trusting = |name: Option<&str>| HttpSettings {
        authorities: name.map(|name| Authorities {
            file: file(name),
            pem: std::fs::read_to_string(file(name)).unwrap(),
        }),
        ..settings(&format!("https://{address}/jobs"))
    };
    assert_eq!(run(trusting(Some("one.crt"))).await.verdict, Verdict::Done);
    let other = file("other.crt").display().to_string();
    for (name, trusted) in [
        (Some("other.crt"), other.as_str()),
        (None, "the system's authorities"),
    ] {
        let ended = run(trusting(name)).await;
        assert_eq!((ended.verdict, ended.reached), (Verdict::RETRY_LONG, false));
        let error = ended.error.unwrap();
        assert!(
            error.contains("certificate") && error.contains(trusted),
            "{error}"
        );
    }
    let refused = Handler::prepare(
        "a",
        &HandlerKind::Http(trusting(Some("one.key"))),
        &mut Clients::default(),
    );
    let refused = refused.unwrap_err().to_string();
    assert!(
        refused.contains("one.key") && refused.contains("no certificate"),
        "{refused}"
    );
}

/// B84: 10,000 headers, and a few large ones.
#[tokio::test]
async fn headers_beyond_their_bounds_fail_the_attempt() {
    let many: String = (0..10_000).map(|n| format!("X-{n}: y\r\n")).collect();
    let ended = Receiver::answering("200 OK", &many, "{}").await;
    let ended = run(settings(&format!("http://{}/", ended.address))).await;
    assert_eq!(ended.verdict, Verdict::RETRY);
    let large = format!("X: {}\r\n", "y".repeat(10_000));
    let receiver = Receiver::answering("200 OK", &large, "{}").await;
    let bounded = |max_headers| HttpSettings {
        max_headers,
        ..settings(&format!("http://{}/", receiver.address))
    };
    assert_eq!(run(bounded(20_000)).await.verdict, Verdict::Done);
    let error = run(bounded(1000)).await.error.unwrap();
    assert!(
        error.contains("at most 1000") && error.contains("max_headers"),
        "{error}"
    );
}

#[tokio::test]
async fn an_answer_that_goes_on_and_on_is_bounded_by_its_own_size_and_time() {
    let receiver = Receiver::start(Script::Endless("HTTP/1.1 200 OK\r\n\r\n")).await;
    let short = HttpSettings {
        max_response: 1000,
        ..settings(&format!("http://{}/", receiver.address))
    };
    let ended = run(short).await;
    assert_eq!(ended.verdict, Verdict::Done);
    assert!(ended.result.unwrap().len() < 1100);
    // A head, and then nothing for ever.
    let head = "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n12";
    let receiver = Receiver::start(Script::Stalling(head)).await;
    let patient = HttpSettings {
        body_timeout: Some(Duration::from_millis(100)),
        ..settings(&format!("http://{}/", receiver.address))
    };
    let ended = run(patient).await;
    assert_eq!(
        (ended.verdict, ended.http_status),
        (Verdict::RETRY, Some(200))
    );
    assert!(ended.error.unwrap().contains("took too long"));
}

/// B82: a receiver that keeps a connection for a moment only and closes it without a word.
#[tokio::test]
async fn connections_are_reused_and_one_that_was_closed_meanwhile_is_replaced() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    let connections = Arc::new(AtomicUsize::new(0));
    let requests = Arc::new(AtomicUsize::new(0));
    let (made, seen) = (Arc::clone(&connections), Arc::clone(&requests));
    tokio::spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            let nth = made.fetch_add(1, Ordering::Relaxed);
            let seen = Arc::clone(&seen);
            tokio::spawn(async move {
                // Every other connection is closed by the receiver after one request.
                let most = if nth % 2 == 0 { 1 } else { 5 };
                for _ in 0..most {
                    if !answer_one(&mut stream).await {
                        return;
                    }
                    seen.fetch_add(1, Ordering::Relaxed);
                }
            });
        }
    });
    let handler = prepare(settings(&format!("http://{address}/")));
    for n in 0..30 {
        let ended = run_task(&executor(), &handler, &task("{}")).await;
        assert_eq!(ended.verdict, Verdict::Done, "{n}: {:?}", ended.error);
        // Until the other side's closing has arrived there is nothing that could be known of it.
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    assert_eq!(requests.load(Ordering::Relaxed), 30);
    assert_eq!(connections.load(Ordering::Relaxed), 10);

    // A receiver that closes in the same moment: no connection is used a second time.
    let alone = prepare(HttpSettings {
        idle_timeout: Duration::ZERO,
        ..settings(&format!("http://{address}/"))
    });
    for _ in 0..5 {
        assert_eq!(
            run_task(&executor(), &alone, &task("{}")).await.verdict,
            Verdict::Done
        );
    }
    assert_eq!(connections.load(Ordering::Relaxed), 15);
}

/// B84: what the head says of the body is not believed, and the status decides.
#[tokio::test]
async fn answers_of_any_shape_are_judged_by_their_status() {
    for (answer, verdict, result) in [
        (
            "204 No Content\r\nContent-Length: 5\r\n\r\nhello",
            Verdict::Done,
            None,
        ),
        (
            "200 OK\r\nContent-Length: 2\r\n\r\n{}{}{}",
            Verdict::Done,
            Some("{}"),
        ),
        (
            "200 OK\r\nContent-Encoding: br\r\nContent-Length: 3\r\n\r\n\u{1}xy",
            Verdict::Done,
            Some("\"\\u0001xy\""),
        ),
        (
            "200 OK\r\nContent-Length: 9999999999\r\n\r\n{}",
            Verdict::RETRY,
            None,
        ),
        (
            "500 No\r\nContent-Length: 9999999999\r\n\r\n{}",
            Verdict::RETRY,
            None,
        ),
        (
            "200 OK\r\nContent-Length: -1\r\n\r\n{}",
            Verdict::RETRY,
            None,
        ),
        (
            "422 No\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n",
            Verdict::Dead,
            None,
        ),
        ("99 What\r\n\r\n", Verdict::RETRY, None),
    ] {
        let receiver = Receiver::start(Script::Answer(format!("HTTP/1.1 {answer}"))).await;
        let ended = run(settings(&format!("http://{}/", receiver.address))).await;
        assert_eq!(ended.verdict, verdict, "{answer:?}: {:?}", ended.error);
        assert_eq!(ended.result.as_deref(), result, "{answer:?}");
        assert!(ended.reached, "{answer:?}");
    }
}
