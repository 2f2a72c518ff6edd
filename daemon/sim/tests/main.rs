//! Thousands of seeds of each world. `TENURE_SIM_SEEDS` sets how many; a seed that fails is kept as a test of its own.
#![allow(clippy::unwrap_used, clippy::expect_used, clippy::panic)]

mod partitions;
mod switches;

use std::time::Duration;

fn seeds(usually: u64) -> u64 {
    std::env::var("TENURE_SIM_SEEDS").map_or(usually, |text| {
        text.parse().expect("TENURE_SIM_SEEDS is a number")
    })
}

/// Plays the seeds on two threads and adds up what they found; `judge` sees the report of each.
fn play<R: Default + Send>(
    seeds: u64,
    run: impl Fn(u64) -> R + Sync,
    judge: impl Fn(u64, &R) + Sync,
    add: impl Fn(&mut R, R) + Sync,
) -> R {
    let one = |seed| {
        let report = run(seed);
        judge(seed, &report);
        report
    };
    let half = |first: u64| {
        let mut sum = R::default();
        for seed in (first..seeds).step_by(2) {
            add(&mut sum, one(seed));
        }
        sum
    };
    std::thread::scope(|scope| {
        let odd = scope.spawn(|| half(1));
        let mut sum = half(0);
        add(&mut sum, odd.join().expect("no odd seed fails"));
        sum
    })
}

const fn secs(s: u64) -> Duration {
    Duration::from_secs(s)
}
