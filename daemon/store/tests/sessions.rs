//! The Rust surface: the life of a worker and of a person's acts through it, and what each failure of the server becomes.

use std::time::Duration;

use tenure_core::ids::{Beat, Call, Epoch, Lane, WorkerId};
use tenure_store::address::Address;
use tenure_store::claim::{ClaimRequest, Mark};
use tenure_store::error::StoreError;
use tenure_store::finish::{Answer, EndKind, Reattach, RunEnd};
use tenure_store::person::{Decision, NewJob};
use tenure_store::route::Route;
use tenure_store::session::{Db, Session, Target};
use tenure_store::view::JobFilter;
use tenure_store::worker::Registration;
use uuid::Uuid;

use crate::support::{Lab, block_on};

#[test]
fn sessions() {
    let lab = Lab::start();
    lab.db("life");
    block_on(the_life_of_a_worker(&lab));
    lab.db("acts");
    block_on(acts_of_persons(&lab));
    lab.db("failures");
    block_on(failures(&lab));
    block_on(a_statement_that_takes_too_long(&lab));
    block_on(a_turn_ends_the_wait_for_a_silent_server(&lab));
    the_worker_of_the_documentation(&lab);
}

async fn session(lab: &Lab) -> Session {
    Session::open(&lab.target("migrated", "postgres", "tenure"))
        .await
        .unwrap()
        .0
}

fn registration() -> Registration {
    Registration {
        name: "w".into(),
        version: "v1".into(),
        lease_ttl: Duration::from_secs(30),
        heartbeat: Duration::from_secs(3),
        job_types: vec!["*".into()],
        concurrency: 4,
    }
}

fn job(job_type: &str, data: &str) -> NewJob {
    NewJob {
        job_type: job_type.into(),
        data: data.into(),
        tenant: "default".into(),
        labels: "{}".into(),
        ..NewJob::default()
    }
}

async fn the_life_of_a_worker(lab: &Lab) {
    let session = session(lab).await;
    let worker = WorkerId(Uuid::new_v4());
    assert_eq!(session.open_epoch(worker, 0).await.unwrap().beat, None);
    let (epoch, number) = session.register(worker, &registration()).await.unwrap();
    let now = session.open_epoch(worker, 0).await.unwrap();
    assert_eq!(
        (now.epoch, now.number, now.beat),
        (epoch, number, Some(Beat(0)))
    );
    // Numbers keep their digits on the way.
    let data = r#"{"n": 12345678901234567890.000}"#;
    let ids = [
        session.enqueue(&job("m", data)).await.unwrap(),
        session.enqueue(&job("m", "[2]")).await.unwrap(),
    ];
    assert_eq!(session.lanes().await.unwrap(), [(Lane(1), "m".to_owned())]);
    let mut request = ClaimRequest {
        lanes: vec![Lane(1)],
        limits: vec![1],
        total: 1,
        max_attempts: vec![3],
        ..ClaimRequest::default()
    };
    let claimed = session
        .claim(worker, epoch, Call(1), &request)
        .await
        .unwrap()
        .remove(0);
    assert_eq!(
        (
            claimed.id.0,
            claimed.run.0,
            claimed.attempt,
            claimed.max_attempts
        ),
        (ids[0], 1, 1, 3)
    );
    assert_eq!(claimed.data, data);
    let mark = Mark {
        lane: Lane(1),
        priority: 0,
        pos: 0,
    };
    let (marks, horizon) = session
        .settle_marks(epoch, &[mark], &[claimed.pos], 0)
        .await
        .unwrap();
    assert_eq!(marks, [mark]);
    request.marks = session
        .settle_marks(epoch, &marks, &[claimed.pos], horizon)
        .await
        .unwrap()
        .0;
    assert_eq!(request.marks[0].pos, claimed.pos);
    let second = session
        .claim(worker, epoch, Call(2), &request)
        .await
        .unwrap()
        .remove(0);
    assert_eq!(second.id.0, ids[1]);

    let answer = session
        .heartbeat(
            worker,
            epoch,
            Beat(1),
            Call(2),
            &[Call(1)],
            1,
            false,
            r#"{"1":[1,0.5]}"#,
        )
        .await
        .unwrap();
    assert_eq!(
        (answer.workers, answer.ghosts, answer.drain, answer.lanes),
        (vec![worker], 1, false, 1)
    );
    let end = RunEnd {
        kind: EndKind::Completed,
        job: claimed.id,
        run: claimed.run,
        token: claimed.token,
        delay_ms: None,
        final_: false,
        exit_code: Some(0),
        http_status: None,
        result: Some(serde_json::value::RawValue::from_string("1.50".into()).unwrap()),
        error: None,
        log_tail: None,
        enqueue: None,
        watermark: None,
    };
    let items = serde_json::to_string(&[&end]).unwrap();
    let answers = session
        .finish(worker, epoch, items.clone(), None)
        .await
        .unwrap();
    assert_eq!(
        (
            answers[0].token,
            answers[0].answer,
            answers[0].status.as_deref()
        ),
        (claimed.token, Answer::Done, Some("completed"))
    );
    assert_eq!(session.job(ids[0]).await.unwrap().result.unwrap().0, "1.50");
    let numbers = session.numbers().await.unwrap();
    assert_eq!(
        (numbers[0].pending_count, numbers[0].avg_duration_sec),
        (1, Some(0.5))
    );
    // A switch: every statement carries the attempt too.
    session
        .batch("test", "DELETE FROM tenure.here")
        .await
        .unwrap();
    let late = session.sweep(epoch).await.unwrap_err();
    assert!(matches!(late, StoreError::OtherEpoch(_)), "{late}");
    let now = session.open_epoch(worker, 7).await.unwrap();
    assert_eq!((now.number, now.beat), (8, Some(Beat(1))));
    let statement = items
        .trim_matches(['[', ']'])
        .replace(r#""kind""#, r#""attempt":1,"call":1,"epoch_no":1,"kind""#);
    let said = Reattach {
        worker,
        epoch: now.epoch,
        beat: Beat(1),
        roster: &[worker],
        registration: &registration(),
        predecessors: &[],
        held: &[],
        covers: &[],
        without_primary: Duration::from_secs(2),
    };
    let answers = session.reattach(said, &[statement]).await.unwrap();
    assert_eq!(answers[0].answer, Answer::Done);
    assert_eq!(session.promote(now.epoch).await.unwrap(), (0, None));
    session
        .set_sleeping(worker, now.epoch, &[Lane(1)])
        .await
        .unwrap();
    session.set_sleeping(worker, now.epoch, &[]).await.unwrap();
    session.deregister(worker, now.epoch).await.unwrap();
    let dead = session
        .claim(worker, now.epoch, Call(3), &request)
        .await
        .unwrap_err();
    assert!(matches!(dead, StoreError::DeadWorker(_)), "{dead}");
    assert_eq!(session.workers(false).await.unwrap().len(), 0);
    assert_eq!(session.workers(true).await.unwrap()[0].status, "stopped");
}

async fn acts_of_persons(lab: &Lab) {
    let session = session(lab).await;
    let many = session
        .enqueue_many(r#"[{"job_type":"m"},{"job_type":"n"}]"#)
        .await
        .unwrap();
    let later = NewJob {
        after: Some(Duration::from_secs(60)),
        unique_key: Some("k".into()),
        ..job("m", "{}")
    };
    let keyed = session.enqueue(&later).await.unwrap();
    assert_eq!(session.enqueue(&later).await.unwrap(), keyed);
    assert_eq!(session.ending(keyed).await.unwrap().status, "scheduled");
    assert_eq!(
        session.cancel_job(keyed, Some("why"), "ann").await.unwrap(),
        "cancelled"
    );
    assert_eq!(
        session.ending(keyed).await.unwrap().last_error.as_deref(),
        Some("cancelled by ann: why")
    );
    assert_eq!(session.retry_job(keyed, "ann").await.unwrap(), "pending");
    session
        .rows(
            "test",
            &format!("SELECT %move_to_dead_letter('{}')", many[1]),
            &[],
        )
        .await
        .unwrap();
    let letter = session.dead_letter_of(many[1]).await.unwrap();
    assert_eq!(
        session
            .review_dead_letter(letter.id, Decision::Retry, "ann", None, Some("[3]"))
            .await
            .unwrap(),
        "pending"
    );
    assert_eq!(session.job(many[1]).await.unwrap().data.0, "[3]");
    let listed = session
        .jobs(&JobFilter {
            status: Some("pending".into()),
            limit: 2,
            ..JobFilter::default()
        })
        .await
        .unwrap();
    assert_eq!(listed.len(), 2);
    for error in [
        session
            .cancel_job(Uuid::new_v4(), None, "ann")
            .await
            .unwrap_err(),
        session.drain_worker(Uuid::new_v4()).await.unwrap_err(),
        session.job(Uuid::new_v4()).await.map(drop).unwrap_err(),
    ] {
        assert!(
            matches!(&error, StoreError::Refused { code, .. } if code == "TN005"),
            "{error}"
        );
    }
}

async fn failures(lab: &Lab) {
    let session = session(lab).await;
    let bad = session.enqueue(&job("", "{}")).await.unwrap_err();
    assert!(
        bad.is_about_input() && matches!(bad, StoreError::Refused { .. }),
        "{bad}"
    );
    let bad = session
        .enqueue(&job("m", r#"{"a":"\u0000"}"#))
        .await
        .unwrap_err();
    assert!(
        bad.is_about_input() && matches!(bad, StoreError::BadValue(_)),
        "{bad}"
    );
    let worker = WorkerId(Uuid::new_v4());
    let other = session.sweep(Epoch(Uuid::new_v4())).await.unwrap_err();
    assert!(matches!(other, StoreError::OtherEpoch(_)) && !other.breaks_connection());
    session
        .batch("test", "SET default_transaction_read_only = on")
        .await
        .unwrap();
    let standby = session.register(worker, &registration()).await.unwrap_err();
    assert!(
        matches!(standby, StoreError::ReadOnly(_)) && standby.breaks_connection(),
        "{standby}"
    );
    session
        .batch("test", "SET default_transaction_read_only = off")
        .await
        .unwrap();
    let elsewhere = Session::open(&lab.target("migrated", "postgres", "nowhere"))
        .await
        .unwrap()
        .0;
    let unmigrated = elsewhere.lanes().await.unwrap_err();
    assert!(
        matches!(unmigrated, StoreError::Unmigrated(_)),
        "{unmigrated}"
    );
    let nobody = Session::open(&lab.target("migrated", "no_such_role", "tenure"))
        .await
        .map(drop)
        .unwrap_err();
    assert!(matches!(nobody, StoreError::Failed(_)), "{nobody}");
    let mut closed = lab.target("migrated", "postgres", "tenure");
    closed.address = tenure_store::address::Address::parse(
        "postgres://postgres@127.0.0.1:1/x",
        None,
        Duration::from_secs(2),
    )
    .unwrap();
    let down = Session::open(&closed).await.map(drop).unwrap_err();
    assert!(matches!(down, StoreError::Unreachable(_)), "{down}");
    // The server ends the session: the next statement says so.
    session
        .batch("test", "SELECT pg_terminate_backend(pg_backend_pid())")
        .await
        .unwrap_err();
    let ended = session.lanes().await.unwrap_err();
    assert!(matches!(ended, StoreError::Unreachable(_)), "{ended}");
}

/// It is stopped on the server, and its connection does not go back to the pool.
async fn a_statement_that_takes_too_long(lab: &Lab) {
    let mut target = lab.target("migrated", "postgres", "tenure");
    target.statement_timeout = Duration::from_millis(300);
    target.connect_timeout = Duration::from_secs(10);
    let db = Db::new(&target, 1).unwrap();
    let slow = db.session().await.unwrap();
    slow.batch("test", "SET statement_timeout = 0")
        .await
        .unwrap();
    let pid = slow
        .rows("test", "SELECT pg_catalog.pg_backend_pid() AS pid", &[])
        .await
        .unwrap()[0]
        .try_get::<_, i32>("pid")
        .unwrap();
    let error = slow
        .batch("sleep", "SELECT pg_catalog.pg_sleep(60)")
        .await
        .unwrap_err();
    assert_eq!(error, StoreError::Timeout("sleep"));
    drop(slow);
    let next = db.session().await.unwrap();
    let other = next
        .rows("test", "SELECT pg_catalog.pg_backend_pid() AS pid", &[])
        .await
        .unwrap()[0]
        .try_get::<_, i32>("pid")
        .unwrap();
    assert_ne!(other, pid);
    let mut watch = lab.reopen("migrated").connect();
    tokio::task::yield_now().await;
    for _ in 0..3000 {
        if watch.one(&format!(
            "SELECT count(*) FROM pg_stat_activity WHERE pid = {pid} AND state = 'active'"
        )) == "0"
        {
            return;
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    panic!("the statement still runs");
}

/// A frozen primary takes connections in and says nothing. Whoever waits for it goes to the next one.
async fn a_turn_ends_the_wait_for_a_silent_server(lab: &Lab) {
    let good = lab.target("migrated", "postgres", "tenure");
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let url = format!(
        "postgres://postgres@{}/migrated",
        silent.local_addr().unwrap()
    );
    let hour = Duration::from_secs(3600);
    let target = Target {
        address: Address::parse(&url, None, hour).unwrap(),
        connect_timeout: hour,
        ..good.clone()
    };
    let route = Route::to_any(&target);
    let turning = async {
        let taken_in = silent.accept().await.unwrap();
        route.turn(&good, None, None);
        taken_in
    };
    let (opened, _taken_in) = tokio::join!(Session::open_along(&target, &route), turning);
    let error = opened.err().unwrap();
    assert!(matches!(error, StoreError::Unreachable(_)), "{error}");
    Session::open_along(&good, &route).await.unwrap();
}

/// The calls that docs/sql.md shows, one after the other.
fn the_worker_of_the_documentation(lab: &Lab) {
    let db = lab.db("documented");
    let mut c = db.connect();
    c.enqueue("mail", "");
    c.run("SET search_path = pg_catalog");
    let text = include_str!("../../../docs/sql.md");
    let (_, section) = text.split_once("## A worker of your own").unwrap();
    let block = section.split("```").nth(1).unwrap();
    let worker = Uuid::new_v4().to_string();
    let mut words = vec![
        ("'W'", format!("'{worker}'")),
        ("{W}", format!("{{{worker}}}")),
    ];
    let mut answers = Vec::new();
    for statement in block.trim_start_matches("sql").split_inclusive(";\n") {
        let mut sql = statement.to_owned();
        for (word, value) in &words {
            sql = sql.replace(word, value);
        }
        let rows = c.list(&sql);
        let cells: Vec<String> = rows
            .first()
            .map(|row| row.split('|').map(str::to_owned).collect())
            .unwrap_or_default();
        if statement.contains("register_worker") {
            words.push(("'E'", format!("'{}'", cells[0])));
        } else if statement.contains("claim_job_batch") {
            words.push(("JOB", cells[0].clone()));
            words.push(("RUN", cells[1].clone()));
            words.push(("TOKEN", cells[2].clone()));
        } else if statement.contains("finish") || statement.contains("reattach") {
            answers.push(cells[3].clone());
        }
    }
    assert_eq!(
        answers,
        ["done", "stop"],
        "it has ended, so it cannot be held"
    );
    db.sound();
}
