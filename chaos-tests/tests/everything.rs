//! Whatever can happen to daemons and to their database, at random, all mixed.

use std::env;
use std::thread;
use std::time::Duration;

use chaos_tests::{Daemon, Lab, Random, UNFINISHED, enqueue_many};
use nix::sys::signal::Signal;

const NAMES: [&str; 3] = ["a", "b", "c"];
const STEPS: usize = 16;

/// A daemon's or the server's state. Only what is up is struck; what is not comes back.
#[derive(Clone, Copy, PartialEq)]
enum State {
    Up,
    Frozen,
    Down,
}

struct World {
    lab: Lab,
    daemons: Vec<(State, Daemon)>,
    server: State,
    acknowledged: Vec<String>,
}

impl World {
    fn start() -> Self {
        let lab = Lab::start();
        let daemons = (0..NAMES.len())
            .map(|index| (State::Up, start(&lab, index)))
            .collect();
        Self {
            lab,
            daemons,
            server: State::Up,
            acknowledged: Vec::new(),
        }
    }

    fn strike_server(&mut self, how: u64) {
        let server = &mut self.lab.server;
        self.server = match (self.server, how) {
            (State::Up, 0) => {
                server.kill9().unwrap();
                server.restart().unwrap();
                State::Up
            }
            (State::Up, 1) => {
                server.stop_fast().unwrap();
                State::Down
            }
            (State::Up, _) => {
                server.freeze().unwrap();
                State::Frozen
            }
            (State::Frozen, _) => {
                server.thaw().unwrap();
                State::Up
            }
            (State::Down, _) => {
                server.restart().unwrap();
                State::Up
            }
        };
    }

    fn strike_daemon(&mut self, index: usize, how: u64) {
        let (state, daemon) = &mut self.daemons[index];
        *state = match (*state, how) {
            (State::Up, 0) => {
                daemon.kill9();
                State::Down
            }
            (State::Up, 1) => {
                daemon.signal(Signal::SIGSTOP);
                State::Frozen
            }
            (State::Up, _) => {
                // Without a database it cannot say everything, and so does not leave cleanly.
                daemon.signal(Signal::SIGTERM);
                daemon.signal(Signal::SIGTERM);
                daemon.wait();
                State::Down
            }
            (State::Frozen, _) => {
                daemon.signal(Signal::SIGCONT);
                State::Up
            }
            (State::Down, _) => {
                *daemon = start(&self.lab, index);
                State::Up
            }
        };
    }

    fn enqueue(&mut self, random: &mut Random) {
        if self.server != State::Up {
            return;
        }
        for job_type in ["ticks-0", "ticks-3", "ticks-15", "stubborn-8"] {
            let count = 1 + usize::try_from(random.below(8)).unwrap();
            self.acknowledged
                .extend(enqueue_many(&mut self.lab.sql(), job_type, count).unwrap());
        }
    }
}

/// Two of the three have a memory of their own.
fn start(lab: &Lab, index: usize) -> Daemon {
    let name = NAMES[index];
    let state_dir = lab.state_dir(name);
    let set: &[&str] = if index < 2 { &[&state_dir] } else { &[] };
    lab.daemon(name, set)
}

fn play(seed: u64) {
    let mut random = Random::new(seed);
    let mut world = World::start();
    for step in 0..STEPS {
        world.enqueue(&mut random);
        thread::sleep(Duration::from_millis(300 + random.below(2500)));
        let (whom, how) = (random.below(5), random.below(3));
        eprintln!("seed {seed}, step {step}: {whom} {how}");
        match usize::try_from(whom).unwrap() {
            index if index < NAMES.len() => world.strike_daemon(index, how),
            _ => world.strike_server(how),
        }
    }
    if world.server != State::Up {
        world.strike_server(0);
    }
    for index in 0..NAMES.len() {
        if world.daemons[index].0 != State::Up {
            world.strike_daemon(index, 0);
        }
    }
    world.lab.until(UNFINISHED, "0");
    for (_, daemon) in &mut world.daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
    world.lab.assert_sound(&world.acknowledged);
}

/// CHAOS_SEEDS=FIRST..END plays others.
#[test]
fn everything_at_once() {
    let seeds = env::var("CHAOS_SEEDS").unwrap_or_else(|_| "1..2".to_owned());
    let (first, end) = seeds.split_once("..").unwrap();
    for seed in first.parse().unwrap()..end.parse().unwrap() {
        play(seed);
    }
}
