//! The clock of recovery: who is lost, what is recovered, and when time counts against nobody. Time passes here by moving what is
//! stored, never by waiting.

use crate::support::{Conn, Lab, Worker, lose};

#[test]
fn sweep() {
    let lab = Lab::start();
    one_at_a_time(&lab);
    lost_workers(&lab);
    gaps(&lab);
    a_step_back(&lab);
    due_jobs(&lab);
    leases_of_nobody(&lab);
    locked_leases(&lab);
    dead_letters_of_lost_workers(&lab);
    old_workers_are_forgotten(&lab);
}

/// As if the last sweep had been so long ago.
fn sweep_after(c: &mut Conn, w: &Worker, gap: &str) -> String {
    c.run(&format!(
        "UPDATE sweep SET swept_at = clock_timestamp() - interval '{gap}'"
    ));
    c.one(&format!(
        "SELECT swept, promoted, recovered, lost FROM sweep('{}')",
        w.epoch
    ))
}

/// As if the last heartbeat of this worker had been so long ago.
fn silent_for(c: &mut Conn, w: &Worker, time: &str) {
    c.run(&format!(
        "UPDATE beat SET beat_at = clock_timestamp() - interval '{time}' WHERE worker = '{}'",
        w.id
    ));
}

fn one_at_a_time(lab: &Lab) {
    let db = lab.db("sweeps");
    let (mut c, mut other) = (db.connect(), db.connect());
    let w = Worker::register(&mut c);
    assert_eq!(sweep_after(&mut c, &w, "1 s"), "t|0|0|0");
    let again = format!("SELECT swept FROM sweep('{}')", w.epoch);
    assert_eq!(c.one(&again), "f", "one has just swept");
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    other.run("BEGIN");
    assert_eq!(other.one(&again), "t");
    assert_eq!(
        c.one(&again),
        "f",
        "one sweeps now, and nobody waits for it"
    );
    other.run("COMMIT");
}

fn lost_workers(lab: &Lab) {
    let db = lab.db("lost_workers");
    let mut c = db.connect();
    let (mut lost, mut alive) = (Worker::register(&mut c), Worker::register(&mut c));
    let (job, other) = (c.enqueue("m", "unique_key => 'k'"), c.enqueue("m", ""));
    let held = lost.claim_one(&mut c, "m");
    alive.claim_one(&mut c, "m");
    silent_for(&mut c, &lost, "29 s");
    assert_eq!(sweep_after(&mut c, &alive, "1 s"), "t|0|0|0");
    silent_for(&mut c, &lost, "31 s");
    sweep_after(&mut c, &alive, "1 s");
    assert_eq!(c.state(&job), "pending/1");
    assert_eq!(c.state(&other), "running/1");
    assert_eq!(
        c.one(&format!(
            "SELECT status FROM workers WHERE id = '{}'",
            lost.id
        )),
        "lost"
    );
    assert_eq!(
        c.one(&format!(
            "SELECT outcome, error LIKE '%heartbeat%' FROM attempts WHERE job_id = '{job}'"
        )),
        "lost|t"
    );
    assert_eq!(lost.beat(&mut c, &[1]).unwrap_err().code, "TN004");
    assert_eq!(lost.end(&mut c, "completed", &held, ""), "history");
    assert_eq!(
        c.enqueue("m", "unique_key => 'k'"),
        job,
        "it still has its key"
    );
    // A heartbeat that is late, and comes before the sweep, revives.
    silent_for(&mut c, &alive, "31 s");
    alive.beat(&mut c, &[1]).unwrap();
    assert_eq!(sweep_after(&mut c, &alive, "1 s"), "t|0|0|0");
    db.sound();
}

/// M8: nobody could renew while the database stood still.
fn gaps(lab: &Lab) {
    let db = lab.db("gaps");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let mut silent = Worker::register(&mut c);
    let (held_for, job, lost) = (c.enqueue("m", ""), c.enqueue("m", ""), c.enqueue("m", ""));
    let first = w.claim_one(&mut c, "m");
    w.claim_one(&mut c, "m");
    silent.claim_one(&mut c, "m");
    assert_eq!(first.job, held_for);
    // At the last sweep, 100 s ago, the worker and the held lease were good; the silent one was due already.
    silent_for(&mut c, &w, "105 s");
    silent_for(&mut c, &silent, "150 s");
    c.run(&format!(
        "UPDATE lease SET until = clock_timestamp() - interval '90 s' WHERE id = '{held_for}'"
    ));
    assert_eq!(sweep_after(&mut c, &w, "100 s"), "t|0|0|0");
    assert_eq!(
        c.one(&format!(
            "SELECT clock_timestamp() - beat_at < interval '10 s' FROM beat WHERE worker = '{}'",
            w.id
        )),
        "t"
    );
    assert_eq!(c.one(&format!("SELECT until - clock_timestamp() BETWEEN interval '5 s' AND interval '11 s' FROM lease WHERE id = '{held_for}'")), "t");
    sweep_after(&mut c, &w, "1 s");
    assert_eq!(c.state(&held_for), "running/1");
    assert_eq!(c.state(&job), "running/1");
    assert_eq!(
        c.state(&lost),
        "pending/1",
        "who was due before the gap is due after it"
    );
    db.sound();
}

/// The server's clock goes back by an hour.
fn a_step_back(lab: &Lab) {
    let db = lab.db("steps_back");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let job = c.enqueue("m", "");
    w.claim_one(&mut c, "m");
    c.run("UPDATE beat SET beat_at = beat_at + interval '1 h'; UPDATE lease SET until = clock_timestamp() + interval '1 h 60 s'");
    assert_eq!(sweep_after(&mut c, &w, "-1 h"), "t|0|0|0");
    assert_eq!(
        c.one("SELECT beat_at <= clock_timestamp() FROM beat"),
        "t",
        "a lost worker is found in time"
    );
    assert_eq!(c.one("SELECT until - clock_timestamp() BETWEEN interval '50 s' AND interval '61 s' FROM lease"), "t");
    assert_eq!(c.state(&job), "running/1");
    assert_eq!(sweep_after(&mut c, &w, "1 s"), "t|0|0|0");
    db.sound();
}

fn due_jobs(lab: &Lab) {
    let db = lab.db("due");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let jobs: Vec<String> = (0..3)
        .map(|number| {
            c.enqueue(
                "m",
                &format!("run_at => now() + interval '{} s'", 3000 + number * 10),
            )
        })
        .collect();
    let promote = format!("SELECT promoted, next_due_ms FROM promote('{}')", w.epoch);
    let next: i64 = c.one(&promote).trim_start_matches("0|").parse().unwrap();
    assert!((2_900_000..=3_000_000).contains(&next), "{next}");
    // The first two are due, the later of them for longer.
    c.run(&format!(
        "UPDATE later SET due = now() - interval '1 s' WHERE id = '{}'",
        jobs[0]
    ));
    c.run(&format!(
        "UPDATE later SET due = now() - interval '2 s' WHERE id = '{}'",
        jobs[1]
    ));
    assert!(c.one(&promote).starts_with("2|"));
    let claimed: Vec<String> = w
        .claim(&mut c, "m", 9)
        .into_iter()
        .map(|held| held.job)
        .collect();
    assert_eq!(claimed, [jobs[1].clone(), jobs[0].clone()]);
    assert_eq!(c.state(&jobs[2]), "scheduled/0");
    // The sweep does it too, and cancel finds a job that was promoted.
    c.run("UPDATE later SET due = now()");
    assert_eq!(sweep_after(&mut c, &w, "1 s"), "t|1|0|0");
    assert_eq!(c.one(&format!("SELECT cancel('{}')", jobs[2])), "cancelled");
    db.sound();
}

/// M8: a claim commits after its worker was declared dead. The next sweep finds the lease.
fn leases_of_nobody(lab: &Lab) {
    let db = lab.db("orphans");
    let (mut c, mut late) = (db.connect(), db.connect());
    let (mut dying, w) = (Worker::register(&mut c), Worker::register(&mut c));
    let job = c.enqueue("m", "");
    late.run("BEGIN");
    dying.claim_one(&mut late, "m");
    silent_for(&mut c, &dying, "31 s");
    assert_eq!(sweep_after(&mut c, &w, "1 s"), "t|0|0|1");
    late.run("COMMIT");
    assert_eq!(c.state(&job), "running/1");
    assert_eq!(sweep_after(&mut c, &w, "1 s"), "t|0|1|0");
    assert_eq!(c.state(&job), "pending/1");
    db.sound();
}

/// A lease that a user's transaction asserts is passed by; locked ones take no place in the limit.
fn locked_leases(lab: &Lab) {
    let db = lab.db("asserted");
    let (mut c, mut user) = (db.connect(), db.connect());
    let (mut dying, w) = (Worker::register(&mut c), Worker::register(&mut c));
    for _ in 0..3 {
        c.enqueue("m", "");
    }
    let held = dying.claim(&mut c, "m", 3);
    user.run("BEGIN");
    for held in &held[..2] {
        user.run(&format!(
            "SELECT assert_lease('{}', '{}')",
            held.job, held.token
        ));
    }
    assert_eq!(c.one("SELECT recover(1, 1)"), "0", "nobody is dead");
    silent_for(&mut c, &dying, "31 s");
    sweep_after(&mut c, &w, "1 s");
    assert_eq!(
        c.list("SELECT status, count(*) FROM jobs GROUP BY 1 ORDER BY 1"),
        ["pending|1", "running|2"]
    );
    // Its own end is still taken while nobody has recovered it, also from a worker that is dead.
    user.run("COMMIT");
    assert_eq!(
        dying.end(&mut c, "completed", &held[0], ""),
        "done completed"
    );
    sweep_after(&mut c, &w, "1 s");
    assert_eq!(c.state(&held[1].job), "pending/1");
    assert_eq!(
        user.code(&format!(
            "SELECT assert_lease('{}', '{}')",
            held[1].job, held[1].token
        )),
        "TN006"
    );
    db.sound();
}

/// A job that kills its workers ends in the dead letters.
fn dead_letters_of_lost_workers(lab: &Lab) {
    let db = lab.db("killers");
    let mut c = db.connect();
    let job = c.enqueue("m", "max_attempts => 2");
    for state in ["pending/1", "failed/2"] {
        let mut w = Worker::register(&mut c);
        w.claim_one(&mut c, "m");
        let successor = Worker::register(&mut c);
        lose(&mut c, &successor, &w);
        assert_eq!(c.state(&job), state);
    }
    assert_eq!(
        c.one("SELECT count(*) FROM dead_letter_jobs WHERE last_error LIKE '%worker was lost%'"),
        "1"
    );
    db.sound();
}

fn old_workers_are_forgotten(lab: &Lab) {
    let db = lab.db("forgotten");
    let mut c = db.connect();
    let (gone, w) = (Worker::register(&mut c), Worker::register(&mut c));
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        gone.id, gone.epoch
    ));
    sweep_after(&mut c, &w, "1 s");
    assert_eq!(c.one("SELECT count(*) FROM workers"), "2");
    c.run("UPDATE worker SET ended_at = ended_at - interval '25 h'");
    sweep_after(&mut c, &w, "1 s");
    assert_eq!(
        c.one("SELECT count(*), (SELECT count(*) FROM beat) FROM worker"),
        "1|1"
    );
}
