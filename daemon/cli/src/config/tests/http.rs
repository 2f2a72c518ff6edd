//! `http` handlers, and where they say how a job ended.

use super::*;

#[test]
fn the_ways_to_an_http_handler_are_checked() {
    let http =
        |rest: &str| format!("[handlers.a]\nhttp = {{ url = \"http://10.1.2.3/jobs\", {rest} }}\n");
    let settings = Case::with(&http(
        r#"allow = ["10.0.0.0/8", "::1"], body_timeout = "1m", max_response = "2KiB", idle_timeout = "0s""#,
    ))
    .settings();
    let Some(HandlerKind::Http(read)) = settings.handlers.resolve("a").map(|a| a.kind) else {
        panic!("an http handler was written")
    };
    assert_eq!(read.allow.len(), 2);
    assert_eq!((read.max_response, read.max_headers), (2048, 64 << 10));
    assert_eq!(read.body_timeout, Some(Duration::from_secs(60)));
    for (wrong, said) in [
        (
            r#"allow = ["10.0.0.0/33"]"#,
            "found \"10.0.0.0/33\": an address such as",
        ),
        (
            r#"allow = ["127.0.0.1"]"#,
            "10.1.2.3, which `allow` does not name",
        ),
        (
            r#"socket = "app.sock""#,
            "http.socket: a full path is expected",
        ),
        (
            r#"socket = "/app.sock", allow = ["10.0.0.0/8"]"#,
            "a Unix socket leads to no address",
        ),
        (
            r#"ca_file = "/nowhere/ca.pem""#,
            "http.ca_file: /nowhere/ca.pem cannot be read",
        ),
        (r#"ca_file = "/dev/null""#, "/dev/null holds no certificate"),
        (r#"body_timeout = "0s""#, "must be longer than zero"),
        (r#"max_headers = 5"#, "a size with its unit"),
    ] {
        let error = Case::with(&http(wrong)).error();
        assert!(error.contains(said), "{wrong}: {error}");
        assert!(error.contains("tenure.toml:"), "{error}");
    }
}

#[test]
fn handlers_are_told_where_to_say_how_a_job_ended() {
    let text = "[handlers.a]\nhttp = { url = \"http://x/\", hold = \"10m\", max_open = 5 }\n";
    let read = |api: &str| Case::with(&format!("[api]\n{api}\n{text}"));
    let settings = read("public_url = \"https://tenure.example/api/\"").settings();
    let Some(HandlerKind::Http(http)) = settings.handlers.resolve("a").map(|a| a.kind) else {
        panic!("an http handler was written")
    };
    let callback = http.callback.as_deref();
    assert_eq!(callback, Some("https://tenure.example/api/v1/jobs/"));
    assert_eq!(http.accepts.hold, Duration::from_secs(600));
    assert_eq!(http.accepts.max_open, 5);
    for wrong in [
        "",
        "tenure.example",
        "ftp://x",
        "http://",
        "http://a@b",
        "http://x?y",
    ] {
        let error = read(&format!("public_url = \"{wrong}\"")).error();
        assert!(
            error.contains("tenure.toml:4: api.public_url: the address"),
            "{wrong}: {error}"
        );
    }
}
