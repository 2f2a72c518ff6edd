//! The few words of HTTP that it takes to ask a daemon or Patroni on this machine.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::time::Duration;

use serde_json::Value;

/// The body of the answer, whatever its status; nothing when there is none within `limit`, or it is no JSON.
pub(crate) fn get(port: u16, path: &str, limit: Duration) -> Option<Value> {
    let (_, body) = ask(port, &format!("GET {path}"), "", limit)?;
    serde_json::from_str(&body).ok()
}

/// The same as text.
pub(crate) fn text(port: u16, path: &str, limit: Duration) -> Option<String> {
    Some(ask(port, &format!("GET {path}"), "", limit)?.1)
}

/// The status and the body of the answer; nothing when there is none within `limit`.
pub(crate) fn post(port: u16, path: &str, body: &Value, limit: Duration) -> Option<(u16, String)> {
    ask(port, &format!("POST {path}"), &body.to_string(), limit)
}

fn ask(port: u16, what: &str, body: &str, limit: Duration) -> Option<(u16, String)> {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let mut stream = TcpStream::connect_timeout(&address, limit).ok()?;
    stream.set_read_timeout(Some(limit)).ok()?;
    let length = body.len();
    let request = format!(
        "{what} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\nContent-Type: application/json\r\nContent-Length: {length}\r\n\r\n{body}"
    );
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (head, body) = text.split_once("\r\n\r\n")?;
    // "HTTP/1.1 200 OK"
    let status = head.split(' ').nth(1)?.parse().ok()?;
    Some((status, body.to_owned()))
}
