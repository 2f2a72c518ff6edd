//! Real servers of this machine.
#![allow(clippy::unwrap_used, clippy::panic)]

mod servers;
mod standbys;

use std::thread;
use std::time::Duration;

fn wait_for(mut done: impl FnMut() -> bool) {
    for _ in 0..6000 {
        if done() {
            return;
        }
        thread::sleep(Duration::from_millis(10));
    }
    panic!("it did not happen within a minute");
}
