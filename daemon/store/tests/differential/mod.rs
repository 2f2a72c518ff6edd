//! The rules of `tenure_core::model` against the SQL functions: the same random statements to both.
//!
//! After each statement the answers, and every few statements the whole states, must be the same up to the names of ids, tokens
//! and epochs. A tail of commits is lost by a copy of the database that is taken at some step and becomes the primary at a later
//! one; the model falls back with it, the daemons do not. `TENURE_DIFF_SEEDS` sets how many histories there are,
//! `TENURE_DIFF_FIRST` the first seed of those on a server.

mod around;
mod attach;
mod daemon;
mod decide;
mod effects;
mod found;
mod names;
mod play;
mod postgres;
mod random;
mod says;
mod sql;
mod state;
mod steps;

use play::{Met, Play};
use postgres::Postgres;

fn number(name: &str, usual: u64) -> u64 {
    std::env::var(name).map_or(usual, |text| {
        text.parse()
            .unwrap_or_else(|_| panic!("{name} is a number"))
    })
}

fn seeds(usual: u64) -> u64 {
    number("TENURE_DIFF_SEEDS", usual)
}

fn some_steps(play: &mut Play<'_>, count: i64) {
    for nth in 0..count {
        play.step();
        if nth % 15 == 14 {
            play.compare();
        }
    }
    play.compare();
}

/// A history on one server.
fn without_loss(postgres: Option<&mut Postgres>, seed: u64) -> Met {
    let mut play = Play::new(seed, postgres);
    play.begin();
    let steps = play.random.between(35, 60);
    some_steps(&mut play, steps);
    play.met
}

/// A history in which one or two switches lose a tail, the second maybe inside the window of the first.
fn with_lost_tails(postgres: Option<&mut Postgres>, seed: u64) -> Met {
    let mut play = Play::new(seed, postgres);
    play.begin();
    let steps = play.random.between(10, 25);
    some_steps(&mut play, steps);
    let switches = if play.random.chance(35) { 2 } else { 1 };
    for _ in 0..switches {
        play.all_beat();
        play.take_copy();
        let steps = play.random.between(3, 18);
        some_steps(&mut play, steps);
        if play.random.chance(50) {
            play.all_beat();
        }
        if play.random.chance(20) {
            play.forget_too_much();
        }
        play.lose_tail();
        let steps = play.random.between(4, 12);
        some_steps(&mut play, steps);
        if play.random.chance(40) {
            play.quiet_time();
        }
    }
    if play.random.chance(60) {
        play.come_to_rest();
        play.retry_switch();
    }
    let steps = play.random.between(10, 25);
    some_steps(&mut play, steps);
    play.met
}

type History = fn(Option<&mut Postgres>, u64) -> Met;

fn on_a_server(count: u64, history: History) -> Met {
    let mut postgres = Postgres::start(play::START);
    let mut met = Met::default();
    let first = number("TENURE_DIFF_FIRST", 0);
    for seed in first..first + count {
        met += history(Some(&mut postgres), seed);
    }
    println!("{met:?}");
    met
}

fn expect(met: &Met, found: &[(&str, u64)]) {
    for (what, times) in found {
        assert!(
            *times > 0,
            "no {what}: the histories are too quiet: {met:?}"
        );
    }
}

#[test]
fn hundreds_of_histories() {
    let met = on_a_server(seeds(360), without_loss);
    let found = [
        ("ghosts", met.ghosts),
        ("lost workers", met.lost_workers),
        ("recovered jobs", met.recovered),
        ("late statements", met.history),
    ];
    expect(&met, &found);
}

#[test]
fn hundreds_of_histories_that_lose_a_tail() {
    let met = on_a_server(seeds(150), with_lost_tails);
    let found = [
        ("restored leases", met.restored),
        ("jobs put back", met.put_back),
        ("leases taken over", met.taken_over),
        ("windows", met.windows_left),
        ("ends written again", met.written_again),
        ("runs whose effects were lost", met.rerun),
        ("jobs set aside", met.set_aside),
        ("holds", met.holds),
        ("accepted copies", met.accepted),
        ("resumes", met.resumed),
        ("jobs retried after a switch", met.retried),
        ("re-attaches in several calls", met.several_calls),
        ("lost answers", met.answers_lost),
    ];
    expect(&met, &found);
}

/// The promises alone, in many more histories than a server could play.
#[test]
fn thousands_of_histories_of_the_model() {
    let mut met = Met::default();
    for seed in 1_000_000..1_000_000 + seeds(3_000) {
        met += with_lost_tails(None, seed);
    }
    println!("{met:?}");
    expect(&met, &[("leases taken over", met.taken_over)]);
}
