//! Epochs and the window after a switch: who opens it, what may be claimed meanwhile, and when it closes.
//!
//! `DELETE FROM here` is what a crash, a promotion or a restore does to the UNLOGGED table. That a real crash does so is asserted
//! once, at the end.

use std::thread;

use crate::support::{Conn, Lab, Worker};

#[test]
fn window() {
    let mut lab = Lab::start();
    every_call_is_refused(&lab);
    opened_once(&lab);
    what_may_be_claimed(&lab);
    what_waits(&lab);
    closes_when_all_have_spoken(&lab);
    closes_without_the_absent(&lab);
    rosters(&lab);
    a_second_switch(&lab);
    the_last_two_and_the_sweep_at_once(&lab);
    hold(&lab);
    a_crash(&mut lab);
}

fn gate(c: &mut Conn) -> String {
    c.one("SELECT gate FROM cluster")
}

fn open(c: &mut Conn, w: &mut Worker) {
    w.epoch = c.one(&format!("SELECT epoch FROM open_epoch('{}')", w.id));
}

fn every_call_is_refused(lab: &Lab) {
    let db = lab.db("calls");
    let mut c = db.connect();
    let w = Worker::register(&mut c);
    let (id, epoch) = (&w.id, &w.epoch);
    let calls = [
        format!("heartbeat('{id}', '{epoch}', 1)"),
        format!("claim_job_batch('{id}', '{epoch}', 1, '{{}}', '{{}}')"),
        format!("settle_marks('{epoch}', '{{}}', '{{}}', '{{}}', '{{}}', 0)"),
        format!("set_sleeping('{id}', '{epoch}', '{{1}}')"),
        format!("finish('{id}', '{epoch}', '[]')"),
        format!("complete('{id}', '{epoch}', '[]')"),
        format!("fail('{id}', '{epoch}', '[]')"),
        format!("release('{id}', '{epoch}', '[]')"),
        format!("snooze('{id}', '{epoch}', '[]')"),
        format!("hold('{id}', '{epoch}', '[]')"),
        format!("reattach('{id}', '{epoch}', 1, '[]')"),
        format!("sweep('{epoch}')"),
        format!("promote('{epoch}')"),
        format!("deregister_worker('{id}', '{epoch}')"),
    ];
    let refused = |c: &mut Conn, what: &str| {
        for call in &calls {
            let refusal = c.refusal(&format!("SELECT {call}"));
            assert_eq!(refusal.code, "TN001", "{what}: {call}");
            assert!(refusal.hint.contains("reattach"), "{refusal:?}");
        }
    };
    c.lose_here();
    refused(&mut c, "here is empty");
    // The session survived a promotion: here is empty, whatever the replicated row of the gate says.
    c.run("UPDATE cluster SET gate = 'open'");
    refused(&mut c, "here is empty and the gate is open");
    let new = Worker::register(&mut c);
    assert_ne!(new.epoch, w.epoch, "register opens the epoch too");
    refused(&mut c, "the next epoch");
    c.enqueue("m", "");
}

fn opened_once(lab: &Lab) {
    let db = lab.db("openings");
    let (mut a, mut b) = (db.connect(), db.connect());
    let (mut first, mut second) = (Worker::register(&mut a), Worker::register(&mut a));
    let before = first.epoch.clone();
    open(&mut a, &mut first);
    assert_eq!(first.epoch, before, "nothing was lost, nothing is opened");
    for round in 2..12 {
        a.lose_here();
        thread::scope(|scope| {
            scope.spawn(|| open(&mut a, &mut first));
            open(&mut b, &mut second);
        });
        assert_eq!(first.epoch, second.epoch);
        assert_eq!(a.one("SELECT epoch_no FROM cluster"), round.to_string());
    }
    a.lose_here();
    assert_eq!(
        a.one(&format!(
            "SELECT epoch_no, gate, beat FROM open_epoch('{}', '{{\"epoch_no\":40}}')",
            first.id
        )),
        "41|window|0",
        "above the highest that anybody has seen; with the beat that the database shows"
    );
    assert_eq!(a.one("SELECT beat FROM open_epoch(random_uuid())"), "~");
}

/// M7: only what was enqueued in the new epoch, and without a unique key.
fn what_may_be_claimed(lab: &Lab) {
    let db = lab.db("claimable");
    let mut c = db.connect();
    let (mut w, _absent) = (Worker::register(&mut c), Worker::register(&mut c));
    let old = c.enqueue("m", "");
    c.lose_here();
    assert!(w.reattach(&mut c, &[], &[], "").is_empty());
    assert_eq!(gate(&mut c), "window");
    let new = c.enqueue("m", "");
    let keyed = c.enqueue("m", "unique_key => 'k'");
    let ids =
        |held: Vec<crate::support::Held>| held.into_iter().map(|held| held.job).collect::<Vec<_>>();
    assert_eq!(ids(w.claim(&mut c, "m", 9)), [new]);
    assert!(w.claim(&mut c, "m", 9).is_empty());
    assert_eq!(
        c.one(&format!(
            "SELECT count(*) FROM jobs WHERE id IN ('{old}', '{keyed}') AND status = 'pending'"
        )),
        "2"
    );
    c.run("UPDATE expected SET spoken_at = now()");
    c.run("SELECT close_window(false)");
    assert_eq!(ids(w.claim(&mut c, "m", 9)), [old, keyed]);
    db.sound();
}

/// What becomes ready in a window waits in later until it closes.
fn what_waits(lab: &Lab) {
    let db = lab.db("waiting");
    let mut c = db.connect();
    let (mut w, absent) = (Worker::register(&mut c), Worker::register(&mut c));
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    let due = c.enqueue("due", "run_at => now() + interval '1 h'");
    c.run("UPDATE later SET due = now() - interval '1 s'");
    let mut jobs = vec![due];
    for (kind, state) in [
        ("released", "scheduled/0"),
        ("failed", "scheduled/1"),
        ("snoozed", "scheduled/0"),
        ("ghost", "scheduled/0"),
    ] {
        c.enqueue(kind, "");
        let held = w.claim_one(&mut c, kind);
        if kind == "ghost" {
            assert_eq!(w.beat(&mut c, &[]).unwrap(), 1);
        } else {
            assert_eq!(w.end(&mut c, kind, &held, ""), "done scheduled");
        }
        assert_eq!(c.state(&held.job), state, "{kind}");
        jobs.push(held.job);
    }
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE waiting_for = 'window'"),
        "2"
    );
    assert_eq!(
        c.one(&format!("SELECT promoted FROM promote('{}')", w.epoch)),
        "0"
    );
    // Nobody is declared lost either.
    c.run(&format!(
        "UPDATE beat SET beat_at = now() - interval '31 s' WHERE worker = '{}'",
        absent.id
    ));
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    assert_eq!(
        c.one(&format!(
            "SELECT swept, gate, promoted, lost FROM sweep('{}')",
            w.epoch
        )),
        "t|window|0|0"
    );
    // The absent one's lease has ended: it closes, and everything goes on.
    c.run("UPDATE cluster SET opened_at = opened_at - interval '31 s'; UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    assert_eq!(
        c.one(&format!(
            "SELECT gate, promoted, lost FROM sweep('{}')",
            w.epoch
        )),
        "open|5|1"
    );
    for job in jobs {
        assert!(c.state(&job).starts_with("pending/"));
    }
    db.sound();
}

fn closes_when_all_have_spoken(lab: &Lab) {
    let db = lab.db("all_spoken");
    let mut c = db.connect();
    let mut workers: Vec<Worker> = (0..3).map(|_| Worker::register(&mut c)).collect();
    let stopped = Worker::register(&mut c);
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        stopped.id, stopped.epoch
    ));
    c.lose_here();
    let mut gates = Vec::new();
    for w in &mut workers {
        w.reattach(&mut c, &[], &[], "");
        w.reattach(&mut c, &[], &[], "");
        gates.push(gate(&mut c));
    }
    assert_eq!(gates, ["window", "window", "open"]);
    // One that leaves has spoken.
    let mut w = workers.remove(0);
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    for gone in &workers {
        c.run(&format!(
            "SELECT deregister_worker('{}', '{}')",
            gone.id, w.epoch
        ));
    }
    c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
    assert_eq!(
        c.one(&format!("SELECT gate FROM sweep('{}')", w.epoch)),
        "open"
    );
    // Alone, the window is over with one's own word.
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(gate(&mut c), "open");
    db.sound();
}

fn closes_without_the_absent(lab: &Lab) {
    let db = lab.db("absent");
    let mut c = db.connect();
    let (mut w, mut absent) = (
        Worker::register(&mut c),
        Worker::register_with(&mut c, "60 s", "3 s"),
    );
    c.enqueue("m", "");
    let held = absent.claim_one(&mut c, "m");
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    for (passed, expected) in [("59 s", "window"), ("2 s", "open")] {
        c.run(&format!(
            "UPDATE cluster SET opened_at = opened_at - interval '{passed}'"
        ));
        c.run(&format!(
            "UPDATE beat SET beat_at = beat_at - interval '{passed}' WHERE worker = '{}'",
            absent.id
        ));
        c.run("UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'");
        c.run(&format!("SELECT sweep('{}')", w.epoch));
        assert_eq!(
            gate(&mut c),
            expected,
            "its own lease_ttl counts, and not ours"
        );
    }
    assert_eq!(
        c.state(&held.job),
        "pending/1",
        "then its jobs are recovered"
    );
    // It comes late all the same, and is told to stop.
    assert_eq!(
        absent.reattach(&mut c, &[held.item("hold", "")], &[], ""),
        ["stop"]
    );
    assert_eq!(c.state(&held.job), "pending/1");
    db.sound();
}

/// M2: the registration of a worker was lost with the tail; another one knew it.
fn rosters(lab: &Lab) {
    let db = lab.db("rosters");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    let mut unknown = Worker::register(&mut c);
    let dead = Worker::register(&mut c);
    c.run(&format!(
        "SELECT deregister_worker('{}', '{}')",
        dead.id, dead.epoch
    ));
    c.run(&format!(
        "DELETE FROM worker WHERE id = '{0}'; DELETE FROM beat WHERE worker = '{0}'",
        unknown.id
    ));
    c.lose_here();
    w.reattach(&mut c, &[], &[&unknown, &dead], "");
    assert_eq!(gate(&mut c), "window");
    assert_eq!(
        c.one("SELECT count(*) FROM expected WHERE spoken_at IS NULL"),
        "1",
        "the dead one is not waited for"
    );
    unknown.reattach(&mut c, &[], &[&w], "");
    assert_eq!(gate(&mut c), "open");
    assert_eq!(
        c.one(&format!(
            "SELECT status FROM workers WHERE id = '{}'",
            unknown.id
        )),
        "live",
        "it is registered again"
    );
    c.enqueue("m", "");
    w.beat(&mut c, &[]).unwrap();
    assert_eq!(
        unknown.claim(&mut c, "m", 1).len(),
        1,
        "and claims once the others know of it again"
    );
    // Without its registration it must not go on.
    let mut nameless = Worker {
        id: c.one("SELECT random_uuid()"),
        ..w.clone()
    };
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    assert_eq!(
        c.one(&format!(
            "SELECT answer FROM reattach('{}', '{}', 1, '[{}]')",
            nameless.id,
            nameless.epoch,
            held.item("hold", "")
        )),
        "stop"
    );
    assert_eq!(nameless.beat(&mut c, &[]).unwrap_err().code, "TN004");
    db.sound();
}

/// M7: a new epoch starts a new window in which everyone speaks again.
fn a_second_switch(lab: &Lab) {
    let db = lab.db("second");
    let mut c = db.connect();
    let (mut first, mut second) = (Worker::register(&mut c), Worker::register(&mut c));
    c.enqueue("m", "");
    let held = first.claim_one(&mut c, "m");
    c.lose_here();
    assert_eq!(
        first.reattach(&mut c, &[held.item("hold", "")], &[&second], ""),
        ["kept"]
    );
    c.enqueue("n", "");
    let new = first.claim_one(&mut c, "n");
    c.lose_here();
    second.reattach(&mut c, &[], &[&first], "");
    assert_eq!(
        gate(&mut c),
        "window",
        "who spoke in the last window is asked again"
    );
    assert!(second.claim(&mut c, "%", 9).is_empty());
    assert_eq!(
        first.reattach(
            &mut c,
            &[held.item("hold", ""), new.item("hold", "")],
            &[&second],
            ""
        ),
        ["kept", "kept"]
    );
    assert_eq!(gate(&mut c), "open");
    assert_eq!(c.one("SELECT epoch_no FROM cluster"), "3");
    db.sound();
}

/// Nobody waits for another in a circle when the last words, the sweep and the heartbeats come together.
fn the_last_two_and_the_sweep_at_once(lab: &Lab) {
    let db = lab.db("together");
    let mut connections: Vec<Conn> = (0..4).map(|_| db.connect()).collect();
    let mut workers: Vec<Worker> = (0..3)
        .map(|_| Worker::register(&mut connections[0]))
        .collect();
    for _ in 0..30 {
        connections[0].lose_here();
        connections[0].run(&format!("SELECT open_epoch('{}')", workers[0].id));
        // The time of all has passed too, so the sweep closes the window and declares them lost, unless they speak.
        connections[0].run(
            "UPDATE cluster SET opened_at = opened_at - interval '60 s'; UPDATE beat SET beat_at = beat_at - interval '60 s'; \
             UPDATE sweep SET swept_at = clock_timestamp() - interval '1 s'",
        );
        let epoch = connections[0].one("SELECT epoch FROM cluster");
        thread::scope(|scope| {
            let (sweeper, speakers) = connections.split_first_mut().unwrap();
            for (w, c) in workers.iter_mut().zip(speakers) {
                scope.spawn(move || w.reattach(c, &[], &[], ""));
            }
            sweeper.run(&format!("SELECT sweep('{epoch}')"));
        });
        connections[0].run("UPDATE worker SET status = 'live', ended_at = NULL");
    }
    assert_eq!(lab.deadlocks(), Vec::<String>::new());
}

fn hold(lab: &Lab) {
    let db = lab.db("on_hold");
    let mut c = db.connect();
    let mut w = Worker::register(&mut c);
    c.enqueue("m", "");
    let held = w.claim_one(&mut c, "m");
    c.run("UPDATE cluster SET gate = 'hold'");
    let job = c.enqueue("m", "");
    assert!(w.claim(&mut c, "m", 9).is_empty());
    assert_eq!(
        w.end(&mut c, "completed", &held, ""),
        "done completed",
        "what runs ends"
    );
    c.lose_here();
    w.reattach(&mut c, &[], &[], "");
    assert_eq!(gate(&mut c), "hold", "only a person opens it");
    assert_eq!(c.state(&job), "pending/0");
    db.sound();
}

/// The real thing: the server is killed. What was committed is there, here is empty; after a clean restart it is not.
fn a_crash(lab: &mut Lab) {
    let mut w = {
        let db = lab.db("crashed");
        let mut c = db.connect();
        let w = Worker::register(&mut c);
        c.enqueue("m", "");
        w
    };
    lab.server.restart().unwrap();
    {
        let mut c = lab.reopen("migrated").connect();
        assert_eq!(
            w.claim(&mut c, "m", 1).len(),
            1,
            "a clean restart loses nothing"
        );
        c.enqueue("m", "");
    }
    lab.server.kill9().unwrap();
    lab.server.restart().unwrap();
    let db = lab.reopen("migrated");
    let mut c = db.connect();
    assert_eq!(w.try_claim(&mut c, "m", 1).unwrap_err().code, "TN001");
    let epoch = w.epoch.clone();
    w.reattach(&mut c, &[], &[], "");
    assert_ne!(w.epoch, epoch);
    assert_eq!(
        c.one("SELECT count(*) FROM jobs WHERE status = 'pending'"),
        "2",
        "it named nothing, so what it had was a ghost"
    );
    assert_eq!(w.claim(&mut c, "m", 9).len(), 2);
    db.sound();
}
