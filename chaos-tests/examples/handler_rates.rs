//! The parts that `scripts/bench-handlers` puts beside the daemon: bare limits, and the handlers that both sides use.
//!
//! ```sh
//! handler_rates spawn COUNT AT_ONCE     # a bare fork-and-exec loop of `true`: seconds
//! handler_rates answer                  # a process handler that answers at once
//! handler_rates serve                   # an HTTP server that answers at once; prints its port
//! handler_rates load PORT COUNT AT_ONCE # a bare keep-alive load generator: seconds
//! ```
#![allow(
    clippy::unwrap_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a measuring rig fails by panicking, and measures by the clock on the wall"
)]

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::{Command, ExitCode, Stdio};
use std::sync::atomic::{AtomicI64, Ordering};
use std::thread;
use std::time::Instant;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    match arguments[..] {
        ["spawn", count, at_once] => timed(count, at_once, |next| {
            while next() {
                let mut child = Command::new("/bin/true");
                child.stdin(Stdio::null()).stdout(Stdio::null());
                assert!(child.status().unwrap().success());
            }
        }),
        ["answer"] => answer(),
        ["serve"] => serve(),
        ["load", port, count, at_once] => timed(count, at_once, |next| {
            let mut stream = TcpStream::connect(format!("127.0.0.1:{port}")).unwrap();
            stream.set_nodelay(true).unwrap();
            let body = format!("{{\"data\":\"{}\"}}", "x".repeat(380));
            let request = format!(
                "POST /jobs HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                body.len()
            );
            let mut input = BufReader::new(stream.try_clone().unwrap());
            while next() {
                stream.write_all(request.as_bytes()).unwrap();
                take_message(&mut input).unwrap();
            }
        }),
        _ => {
            eprintln!(
                "usage: handler_rates spawn COUNT AT_ONCE | answer | serve | load PORT COUNT AT_ONCE"
            );
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}

/// Has `count` things done by so many threads, and prints how many seconds that took.
fn timed(count: &str, at_once: &str, work: impl Fn(&dyn Fn() -> bool) + Sync) {
    let left = AtomicI64::new(count.parse().unwrap());
    let next = || left.fetch_sub(1, Ordering::Relaxed) > 0;
    let begun = Instant::now();
    thread::scope(|scope| {
        for _ in 0..at_once.parse::<usize>().unwrap() {
            scope.spawn(|| work(&next));
        }
    });
    println!("{:.3}", begun.elapsed().as_secs_f64());
}

/// Answers each job with nothing, by looking for its id alone.
fn answer() {
    let mut out = std::io::stdout().lock();
    out.write_all(b"{\"type\":\"ready\",\"concurrency\":1000}\n")
        .unwrap();
    out.flush().unwrap();
    let mut input = BufReader::with_capacity(1 << 16, std::io::stdin().lock());
    let mut line = String::new();
    while input.read_line(&mut line).unwrap() > 0 {
        if let Some((_, rest)) = line.split_once("\"id\":\"")
            && line.starts_with("{\"type\":\"job\"")
        {
            writeln!(out, "{{\"type\":\"result\",\"id\":\"{}\"}}", &rest[..36]).unwrap();
        }
        // What has come together is answered together.
        if input.buffer().is_empty() {
            out.flush().unwrap();
        }
        line.clear();
    }
}

/// A thread for each connection; answers 200 with no body.
fn serve() {
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    println!("{}", listener.local_addr().unwrap().port());
    for stream in listener.incoming() {
        let mut stream = stream.unwrap();
        thread::spawn(move || {
            stream.set_nodelay(true).unwrap();
            let mut input = BufReader::new(stream.try_clone().unwrap());
            while take_message(&mut input).is_some() {
                let answer = b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
                if stream.write_all(answer).is_err() {
                    return;
                }
            }
        });
    }
}

/// Reads one message of either side to the end of its body; `None` at the end of the connection.
fn take_message(input: &mut impl BufRead) -> Option<()> {
    let (mut line, mut length) = (String::new(), 0);
    loop {
        line.clear();
        if input.read_line(&mut line).ok()? == 0 {
            return None;
        }
        let text = line.trim_end().to_ascii_lowercase();
        if text.is_empty() {
            break;
        }
        if let Some(value) = text.strip_prefix("content-length:") {
            length = value.trim().parse().ok()?;
        }
    }
    let mut body = vec![0; length];
    input.read_exact(&mut body).ok()
}
