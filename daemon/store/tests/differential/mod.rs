//! The rules of `tenure_core::model` against the SQL functions: the same random statements to both.
//!
//! After each statement the answers, and every few statements the whole states, must be the same up to the names of ids, tokens
//! and epochs. A tail of commits is lost by a copy of the database that is taken at some step and becomes the primary at a later
//! one; the model falls back with it, the daemons do not. `TENURE_DIFF_SEEDS` sets how many histories there are.

mod daemon;
mod names;
mod play;
mod postgres;
mod random;
mod sql;
mod state;
mod steps;

use play::{Met, Play};
use postgres::Postgres;

fn seeds(usual: u64) -> u64 {
    std::env::var("TENURE_DIFF_SEEDS").map_or(usual, |text| {
        text.parse().expect("TENURE_DIFF_SEEDS is a number")
    })
}

fn some_steps(play: &mut Play<'_>, count: i64) {
    for nth in 0..count {
        play.step();
        if nth % 8 == 7 {
            play.compare();
        }
    }
    play.compare();
}

/// A history on one server.
fn without_loss(postgres: &mut Postgres, seed: u64) -> Met {
    let mut play = Play::new(seed, postgres);
    let steps = play.random.between(35, 60);
    some_steps(&mut play, steps);
    play.met
}

/// A history in which one or two switches lose a tail, the second maybe inside the window of the first.
fn with_lost_tails(postgres: &mut Postgres, seed: u64) -> Met {
    let mut play = Play::new(seed, postgres);
    let steps = play.random.between(15, 30);
    some_steps(&mut play, steps);
    let switches = if play.random.chance(35) { 2 } else { 1 };
    for _ in 0..switches {
        let copy = play.postgres.copy();
        let earlier = play.model.clone();
        let steps = play.random.between(3, 18);
        some_steps(&mut play, steps);
        play.note("  -- the tail is lost".to_owned());
        play.postgres.fall_back_to(&copy);
        play.model.fall_back_to(&earlier);
        play.met.switches += 1;
        let outage = play.random.between(0, 4) * 1_000;
        play.pass(outage);
        for nth in 0..play.daemons.len() {
            let late = play.random.between(0, 4) * play.random.between(0, 3) * 1_000;
            let daemon = &mut play.daemons[nth];
            daemon.silent_until = play.mono + late;
            daemon.dead |= play.random.chance(12);
        }
        let steps = play.random.between(4, 12);
        some_steps(&mut play, steps);
    }
    let steps = play.random.between(10, 25);
    some_steps(&mut play, steps);
    play.met
}

fn run(count: u64, history: fn(&mut Postgres, u64) -> Met) -> Met {
    let mut postgres = Postgres::start(play::START);
    let mut met = Met::default();
    for seed in 0..count {
        met += history(&mut postgres, seed);
    }
    println!("{met:?}");
    met
}

#[test]
fn four_hundred_histories() {
    let met = run(seeds(400), without_loss);
    for (what, times) in [
        ("claims", met.claimed),
        ("ghosts", met.ghosts),
        ("lost workers", met.lost_workers),
        ("recovered", met.recovered),
        ("history", met.history),
    ] {
        assert!(times > 0, "no {what}: the histories are too quiet: {met:?}");
    }
}

#[test]
fn two_hundred_histories_that_lose_a_tail() {
    let met = run(seeds(200), with_lost_tails);
    for (what, times) in [
        ("restored leases", met.restored),
        ("jobs put back", met.put_back),
        ("leases taken over", met.taken_over),
        ("windows", met.windows_left),
    ] {
        assert!(times > 0, "no {what}: the histories are too quiet: {met:?}");
    }
}
