//! What the daemons say of their primary: `GET /readyz` of each, again and again.

use std::sync::atomic::{AtomicBool, Ordering::SeqCst};
use std::sync::{Arc, Mutex};
use std::thread;
use std::time::Duration;

use serde_json::Value;

use tenure_verdict::{Said, uptime};

use crate::http;

/// From one question to the next.
const STEP: Duration = Duration::from_millis(20);

/// How long a daemon may take to answer.
const SILENCE: Duration = Duration::from_secs(1);

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
                    let primary =
                        http::get(port, "/readyz", SILENCE).and_then(|answer| primary(&answer));
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
