//! Plays one fault with one queue and prints what came of it, as a line of JSON: what `scripts/compare-failover` is made of.
//!
//! ```sh
//! compare_failover QUEUE FAULT [SEED]
//! ```
//!
//! Each [`Queue`] gets the same: three servers behind one proxy, three worker processes with four jobs at a time, the same
//! producers, and the same witness as its handler. The numbers are computed ([`numbers`]) from what witnesses and producers wrote and from
//! the queue's table at the end.
#![allow(
    clippy::unwrap_used,
    clippy::expect_used,
    clippy::panic,
    clippy::print_stdout,
    clippy::print_stderr,
    clippy::disallowed_methods,
    reason = "a rig fails by panicking, and measures by the clock on the wall"
)]

mod faults;
mod numbers;
mod pg_boss;
mod queue;
mod rig;
mod tenure;

use std::env;
use std::process::ExitCode;

use crate::faults::Fault;
use crate::pg_boss::PgBoss;
use crate::queue::Queue;
use crate::rig::Rig;
use crate::tenure::Tenure;

fn main() -> ExitCode {
    let arguments: Vec<String> = env::args().skip(1).collect();
    let arguments: Vec<&str> = arguments.iter().map(String::as_str).collect();
    let (queue, fault, seed) = match arguments[..] {
        [queue, fault] => (queue, fault, Some(1)),
        [queue, fault, seed] => (queue, fault, seed.parse().ok()),
        _ => ("", "", None),
    };
    let queue: Option<&dyn Queue> = match queue {
        "tenure" => Some(&Tenure),
        "pg-boss" => Some(&PgBoss),
        _ => None,
    };
    let (Some(queue), Some(fault), Some(seed)) = (queue, Fault::named(fault), seed) else {
        let faults: Vec<&str> = Fault::ALL.iter().map(|fault| fault.name()).collect();
        eprintln!(
            "usage: compare_failover tenure|pg-boss {} [SEED]",
            faults.join("|")
        );
        return ExitCode::from(2);
    };
    let mut rig = Rig::start(queue, seed);
    fault.strike(&mut rig);
    println!("{}", rig.finish().line(queue.name(), fault.name(), seed));
    ExitCode::SUCCESS
}
