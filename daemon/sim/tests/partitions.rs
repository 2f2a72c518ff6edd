//! One database and many workers: partitions, crashes, frozen daemons.

use tenure_sim::{Report, Violation, World, run};

use crate::secs;

fn seeds() -> u64 {
    crate::seeds(1_000)
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

/// The usual settings, played with leases of another length than the workers believe in.
fn with_margin(seconds: u64) -> World {
    let believed = usual().limits;
    let ttl = believed.trust() + secs(seconds);
    World { ttl, ..usual() }
}

#[test]
fn partitions_crashes_frozen_daemons_and_a_troubled_server() {
    let found = play(seeds(), usual(), flawless);
    let counts = found.counts;
    for (what, how_often) in [
        ("starts", found.started),
        ("kills at the end of trust", found.distrusted),
        ("ghosts", counts.ghosts),
        ("deaths", counts.deaths),
        ("recovered jobs", counts.recovered),
        ("gaps", counts.gaps),
        ("refused completions", counts.refused),
    ] {
        assert!(
            how_often >= seeds(),
            "{what}: only {how_often} times, so the world is too quiet"
        );
    }
}

#[test]
fn short_leases_in_the_same_world() {
    play(
        seeds() / 2,
        World::new(secs(10), secs(3), secs(10)).unwrap(),
        flawless,
    );
}

/// Nothing keeps a frozen machine from having two handlers of a job; then the token refuses the second completion.
#[test]
fn frozen_machines_are_fenced_by_the_token() {
    let world = World {
        frozen_machines: true,
        ..usual()
    };
    let found = play(seeds() / 2, world, flawless);
    assert!(
        found.doubles > 0 && found.counts.refused > 0,
        "the world is too quiet: {found:?}"
    );
}

/// The simulation can fail: with a margin shorter than what it is made of, handlers outlive their leases.
#[test]
fn without_its_margin_the_keeper_fails() {
    let wrong = |margin| {
        let found = play(seeds() / 4, with_margin(margin), |_, _| {});
        found
            .violations
            .iter()
            .filter(|what| matches!(what, Violation::TwoHandlers { .. }))
            .count()
    };
    assert!(wrong(0) > 10);
    assert!(wrong(4) > 0);
}

#[test]
fn a_seed_tells_the_whole_story() {
    assert_eq!(
        format!("{:?}", run(7, usual())),
        format!("{:?}", run(7, usual()))
    );
}
