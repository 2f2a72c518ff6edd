//! Switches of the database at the command line.

use crate::house::House;

/// A worker without a daemon: registered, and with a claimed job of which it says later that it had completed it.
struct Worker {
    id: String,
    job: String,
    run: String,
    token: String,
}

/// The one value of a query; of several, the first.
fn value(house: &House, sql: &str) -> String {
    let first = house.sql(sql).into_iter().next();
    first
        .and_then(|row| row.into_iter().next())
        .flatten()
        .unwrap_or_default()
}

impl Worker {
    fn with_a_job(house: &House) -> Self {
        let id = value(house, "SELECT tenure.random_uuid()");
        let registered = format!(
            "SELECT tenure.enqueue('settle'); SELECT epoch FROM tenure.register_worker('{id}', 'w', '', '30 s', '3 s', '{{settle}}')"
        );
        value(house, &registered);
        let claim = format!(
            "SELECT id || ' ' || run || ' ' || token FROM tenure.claim_job_batch('{id}', (SELECT epoch FROM tenure.cluster), 1, '{{1}}', '{{1}}')"
        );
        let claimed = value(house, &claim);
        let mut words = claimed.split(' ').map(str::to_owned);
        let mut next = || words.next().unwrap();
        Self {
            job: next(),
            run: next(),
            token: next(),
            id,
        }
    }

    /// After a crash of the server: it remembers the end of its run.
    fn reattach(&self, house: &House, options: &str) {
        let Self {
            id,
            job,
            run,
            token,
        } = self;
        value(
            house,
            &format!("SELECT epoch FROM tenure.open_epoch('{id}')"),
        );
        value(
            house,
            &format!(
                "SELECT answer FROM tenure.reattach('{id}', (SELECT epoch FROM tenure.cluster), 1, \
                 '[{{\"kind\":\"completed\",\"job\":\"{job}\",\"run\":{run},\"token\":\"{token}\",\"attempt\":1,\"call\":1,\"epoch_no\":1,\"confirmed\":true}}]', \
                 '{{}}', '{{{options}}}')"
            ),
        );
    }
}

fn lose_here(house: &House) {
    value(house, "DELETE FROM tenure.here");
}

#[test]
fn a_switch_is_shown_and_its_jobs_run_again() {
    let house = House::new();
    assert_eq!(house.ok(&["cluster", "switches", "list"]), "");
    let worker = Worker::with_a_job(&house);
    lose_here(&house);
    worker.reattach(&house, "\"without_primary_ms\": 1500");
    let status = house.ok(&["cluster", "status"]);
    assert!(
        status.starts_with("gate\topen: jobs are claimed\n"),
        "{status}"
    );
    let list = house.ok(&["cluster", "switches", "list"]);
    assert!(
        list.starts_with("2\t") && list.contains("\tcrash\t1.50 s\t"),
        "{list}"
    );
    let shown = house.ok(&["cluster", "switches", "show", "2"]);
    assert!(
        shown.contains("completions and failures written again\t1\n"),
        "{shown}"
    );
    let jobs = house.json(&["cluster", "switches", "show", "2", "--jobs"]);
    assert_eq!(jobs[0]["job_id"], worker.job.as_str());
    assert_eq!(jobs[0]["what"], "written_again");
    let retried = house.ok(&["job", "retry", "--switch", "2"]);
    assert_eq!(retried, format!("{}\tpending", worker.job));
    let again = house.ok(&["job", "retry", "--switch", "2"]);
    assert_eq!(again, format!("{}\thas gone on since: pending", worker.job));
    // More than one call of the database's function takes.
    value(
        &house,
        "INSERT INTO tenure.switch_job (epoch_no, job_id, run, what)
         SELECT 2, tenure.enqueue('settle'), 1, 'written_again' FROM generate_series(1, 2000)",
    );
    let all = house.ok(&["job", "retry", "--switch", "2"]);
    assert_eq!(all.lines().count(), 2_001);
}

#[test]
fn what_only_a_person_can_decide() {
    let house = House::new();
    for refused in [
        &["cluster", "accept", "--reason", "moved"][..],
        &["cluster", "resume"],
    ] {
        let said = house.run(refused);
        assert_eq!(said.code, 4, "{}", said.err);
        assert!(
            said.err.contains("hint: See `tenure cluster status`."),
            "{}",
            said.err
        );
    }
    for missing in [
        &["cluster", "switches", "show", "7"][..],
        &["job", "retry", "--switch", "7"],
    ] {
        assert_eq!(house.run(missing).code, 3);
    }
    for wrong in [&["cluster", "accept"][..], &["job", "retry"]] {
        assert_eq!(house.run(wrong).code, 2);
    }
    // Restored to a time of which nobody remembers what came after.
    let worker = Worker::with_a_job(&house);
    value(&house, "SELECT tenure.enqueue('settle')");
    lose_here(&house);
    let covers = format!(
        "\"covers\": [{{\"worker\": \"{}\", \"from\": 7, \"ms\": 60000}}]",
        worker.id
    );
    worker.reattach(&house, &covers);
    let status = house.ok(&["cluster", "status"]);
    for part in [
        "hold: nothing is claimed",
        "restored",
        "tenure cluster resume",
    ] {
        assert!(status.contains(part), "{status}");
    }
    let cancelled = house.run(&["job", "cancel", &worker.job]);
    assert_eq!(cancelled.code, 4);
    assert!(
        cancelled.err.contains("tenure cluster status"),
        "{}",
        cancelled.err
    );
    assert_eq!(
        house.ok(&["cluster", "resume"]),
        "The gate is open. 1 jobs became dead letters: `tenure dead list`."
    );
    assert!(
        house
            .ok(&["dead", "list"])
            .contains("it may have run already")
    );
    // A copy on another system.
    value(&house, "UPDATE tenure.cluster SET system_id = 1");
    value(
        &house,
        &format!("SELECT epoch FROM tenure.open_epoch('{}')", worker.id),
    );
    let status = house.ok(&["cluster", "status"]);
    assert!(
        status.contains("tenure cluster accept --reason WHY"),
        "{status}"
    );
    let accepted = house.ok(&["cluster", "accept", "--reason", "upgraded"]);
    assert_eq!(
        accepted,
        "The gate opens when all workers have re-attached."
    );
    let list = house.ok(&["cluster", "switches", "show", "3"]);
    assert!(list.contains("decision\taccepted: upgraded\n"), "{list}");
    // A server that lacks what a newer one had, which is lost for good.
    house.ok(&["cluster", "accept", "--timeline", "9", "--reason", "burnt"]);
    let probe = format!("SELECT instead_of FROM tenure.probe('{}')", worker.id);
    assert_eq!(value(&house, &probe), "9");
}
