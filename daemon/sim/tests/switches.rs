//! Switches of the primary.

use tenure_sim::switches::{Fault, Report, Violation, World, run};

use crate::secs;

fn seeds() -> u64 {
    crate::seeds(600)
}

fn play(seeds: u64, world: World, judge: impl Fn(u64, &Report) + Sync) -> Report {
    crate::play(seeds, |seed| run(seed, world), judge, Report::add)
}

fn usual() -> World {
    World::new(secs(30), secs(3), secs(10)).unwrap()
}

fn flawless(seed: u64, report: &Report) {
    assert_eq!(report.violations, [], "seed {seed}");
}

#[test]
fn primaries_fall_and_nothing_is_lost_or_done_twice() {
    let found = play(seeds(), usual(), flawless).counts;
    for (what, how_often, in_a_hundred) in [
        ("starts", found.started, 500),
        ("kills at the end of trust", found.distrusted, 10),
        ("promotions", found.promotions, 80),
        ("lost commits", found.lost_commits, 200),
        ("windows", found.windows, 100),
        ("windows that all closed", found.closed_by_all, 80),
        ("second switches in a window", found.second_switches, 15),
        ("restored leases", found.restored_leases, 8),
        ("jobs put back", found.put_back, 5),
        ("completions written again", found.written_again, 12),
        ("registrations made again", found.registered_again, 2),
        ("proofs", found.proofs, 500),
        ("successions", found.successions, 8),
        ("follow-ups", found.follow_ups, 100),
        ("confirmations by old primaries", found.astray, 8),
    ] {
        assert!(
            how_often * 100 >= seeds() * in_a_hundred,
            "{what}: only {how_often} times, so the world is too quiet"
        );
    }
}

#[test]
fn short_leases() {
    let world = World::new(secs(12), secs(2), secs(10)).unwrap();
    play(seeds() / 3, world, flawless);
}

/// Daemons that reach only the old primary may run what the new side runs too; none of the others does.
#[test]
fn two_primaries() {
    let world = World {
        two_primaries: true,
        ..usual()
    };
    let found = play(seeds() / 3, world, flawless).counts;
    assert!(found.astray > 0, "the world is too quiet: {found:?}");
}

/// While no server is a primary and all others show that they are standbys, handlers go on for as long as it takes.
#[test]
fn handlers_outlive_outages_of_any_length() {
    for seconds in [10, 60, 300] {
        let world = World {
            bad_network: false,
            bad_replication: false,
            daemon_troubles: false,
            outage: Some(secs(seconds)),
            ..usual()
        };
        let found = play(seeds() / 60, world, flawless).counts;
        assert_eq!(found.distrusted, 0, "{seconds} s: {found:?}");
        assert!(found.proofs > 0 && found.started > 0, "{found:?}");
    }
}

/// The simulation can fail: each rule that the daemons break is found. Those that matter rarely are played with seeds in which they do.
#[test]
fn broken_rules_are_found() {
    let many: Vec<u64> = (0..200).collect();
    for (fault, seeds) in [
        (Fault::MemoryOff, many.as_slice()),
        (Fault::BucketTooEarly, many.as_slice()),
        (Fault::PrimaryUnasked, &[67, 69, 78, 223, 294, 338]),
        (Fault::OrderedByAttempt, &[393, 437, 441, 520, 576, 895]),
        (Fault::ProofTooEasy, &[121, 415, 521, 621]),
        (Fault::RostersIgnored, &[959]),
    ] {
        let world = World { fault, ..usual() };
        let found = seeds.iter().flat_map(|seed| run(*seed, world).violations);
        assert!(found.count() > 0, "{fault:?}");
        // It is this rule that keeps these seeds from going wrong.
        for seed in seeds.iter().take(6) {
            flawless(*seed, &run(*seed, usual()));
        }
    }
}

/// Seeds that failed once: a worker was admitted whom another had not heard of, since the answer to its beat was lost; and a run
/// that an old primary had given out won over a completion.
#[test]
fn seeds_that_failed() {
    for seed in [80_024, 92_583] {
        flawless(seed, &run(seed, usual()));
    }
}

/// Not a promise kept but a hole known: a pause of the primary in which its clock stands still too leaves no gap between two sweeps,
/// so it excuses nobody, while who is cut off from it has proven meanwhile that there is no primary, and trusts for longer. When
/// this fails the hole is closed, and the test should say so.
#[test]
fn a_clock_that_stands_still_is_not_noticed() {
    let world = World {
        bad_network: false,
        bad_replication: false,
        daemon_troubles: false,
        clock_stands: true,
        ..usual()
    };
    let doubles = run(32, world).violations;
    assert!(matches!(doubles[..], [Violation::TwoHandlers { .. }, ..]));
}

#[test]
fn a_seed_tells_the_whole_story() {
    assert_eq!(
        format!("{:?}", run(7, usual())),
        format!("{:?}", run(7, usual()))
    );
}
