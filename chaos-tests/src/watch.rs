//! What the daemons say of their primary: `GET /readyz` of each, again and again.

use std::io::{Read as _, Write as _};
use std::net::{Ipv4Addr, TcpStream};
use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use crate::witness::uptime;

/// From one question to the next.
const STEP: Duration = Duration::from_millis(20);

/// How long a daemon may take to answer.
const SILENCE: Duration = Duration::from_secs(1);

/// A daemon changed what it says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Said {
    /// When it was heard.
    pub at: Duration,
    /// Which daemon, by its place in the list of ports.
    pub daemon: usize,
    /// Whether it has a primary that answers; nothing when it does not say.
    pub primary: Option<bool>,
}

/// Asks until it is dropped.
#[derive(Debug)]
pub(crate) struct Watch {
    said: Arc<Mutex<Vec<Said>>>,
    over: Arc<AtomicBool>,
}

impl Watch {
    /// Watches the daemons with these ports.
    pub(crate) fn start(ports: &[u16]) -> Self {
        let watch = Self {
            said: Arc::default(),
            over: Arc::default(),
        };
        for (daemon, &port) in ports.iter().enumerate() {
            let (said, over) = (Arc::clone(&watch.said), Arc::clone(&watch.over));
            thread::spawn(move || {
                let mut last = None;
                while !over.load(SeqCst) {
                    let primary = readyz(port).and_then(|answer| primary(&answer));
                    if primary != last {
                        last = primary;
                        let at = uptime();
                        said.lock().expect("no watcher panics").push(Said {
                            at,
                            daemon,
                            primary,
                        });
                    }
                    thread::sleep(STEP);
                }
            });
        }
        watch
    }

    /// All that was heard, in order.
    pub(crate) fn said(&self) -> Vec<Said> {
        self.said.lock().expect("no watcher panics").clone()
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        self.over.store(true, SeqCst);
    }
}

fn primary(answer: &Value) -> Option<bool> {
    answer
        .pointer("/data/primary")
        .or_else(|| answer.get("primary"))?
        .as_bool()
}

/// The body of the answer, whatever its status.
fn readyz(port: u16) -> Option<Value> {
    let address = (Ipv4Addr::LOCALHOST, port).into();
    let mut stream = TcpStream::connect_timeout(&address, SILENCE).ok()?;
    stream.set_read_timeout(Some(SILENCE)).ok()?;
    let request =
        format!("GET /readyz HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).ok()?;
    let mut text = String::new();
    stream.read_to_string(&mut text).ok()?;
    let (_, body) = text.split_once("\r\n\r\n")?;
    serde_json::from_str(body).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_missing_field_says_nothing() {
        for (text, expected) in [
            (r#"{"success":true,"data":{"primary":false}}"#, Some(false)),
            (r#"{"success":false,"data":{"primary":true}}"#, Some(true)),
            (r#"{"primary":false}"#, Some(false)),
            (r#"{"success":true,"data":{"ready":true}}"#, None),
            (r#"{"data":{"primary":null}}"#, None),
        ] {
            let answer = serde_json::from_str(text).unwrap();
            assert_eq!(primary(&answer), expected, "{text}");
        }
    }
}
