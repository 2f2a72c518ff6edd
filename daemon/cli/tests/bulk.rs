//! `tenure enqueue --from`.

use std::fs;
use std::io::Write as _;

use serde_json::json;

use crate::house::House;

fn count(house: &House) -> String {
    house.sql("SELECT count(*) FROM tenure.jobs")[0][0]
        .clone()
        .unwrap()
}

#[test]
fn a_file_of_jobs_goes_in() {
    let house = House::new();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("jobs.ndjson");
    let id = "01890a5d-ac96-774b-bcce-b302099a8057";
    let lines = [
        json!({"job_type": "mail", "data": {"to": "ann"}, "priority": -5, "tenant": "a", "labels": {"x": "1"}, "max_attempts": 2,
            "timeout": "90 s", "run_at": "2031-05-01T08:00:00Z", "options": {"notify": false}})
        .to_string(),
        json!({"id": id}).to_string(),
        r#"{"data": {"n": 18446744073709551616}, "unique_key": "k"}"#.to_owned(),
        r#"{"data": "the second of this key is the first", "unique_key": "k"}"#.to_owned(),
    ];
    fs::write(&file, lines.join("\r\n\n")).unwrap();
    let path = file.to_str().unwrap();
    let done = house.json(&["enqueue", "report", "--from", path]);
    assert_eq!(
        (
            &done["enqueued"],
            &done["existing"],
            &done["read"],
            &done["last_line"]
        ),
        (&json!(3), &json!(1), &json!(4), &json!(7))
    );
    let rows = house.sql(
        "SELECT job_type, tenant_id, priority, data, run_at AT TIME ZONE 'UTC', max_attempts, labels FROM tenure.jobs ORDER BY job_type, created_at, data",
    );
    let text = |row: usize| {
        rows[row]
            .iter()
            .flatten()
            .cloned()
            .collect::<Vec<_>>()
            .join("|")
    };
    assert_eq!(
        text(0),
        r#"mail|a|-5|{"to": "ann"}|2031-05-01 08:00:00|2|{"x": "1"}"#
    );
    assert!(
        rows.iter()
            .any(|row| row[3].as_deref() == Some(r#"{"n": 18446744073709551616}"#))
    );
    // What has an id of its own may come again, and the rest of these lines has a key.
    let again = house.json(&["enqueue", "report", "--from", path, "--start-line", "3"]);
    assert_eq!(
        (&again["enqueued"], &again["existing"]),
        (&json!(0), &json!(3))
    );
    assert_eq!(count(&house), "3");
    // Standard input, for people.
    let said = house.feed(&["enqueue", "report", "--from", "-"], "{}\n{}");
    assert_eq!(said.code, 0, "{}", said.err);
    assert!(said.out.starts_with("2 jobs are in; "), "{}", said.out);
}

#[test]
fn a_bad_line_is_named_and_nothing_of_its_batch_is_lost() {
    let house = House::new();
    let good = r#"{"job_type":"m"}"#;
    let folder = tempfile::tempdir().unwrap();
    let rejects = folder.path().join("rejects");
    // Wrong for this program, and for the database alone.
    for (bad, says) in [
        (r#"{"job_type":"m","prio":1}"#, "unknown field `prio`"),
        (r#"{"job_type":"m*"}"#, "has a *"),
        (
            r#"{"job_type":"m","data":"\u0000"}"#,
            "unsupported Unicode escape sequence",
        ),
        (
            r#"{"job_type":"m","run_at":"soon"}"#,
            "invalid input syntax for type timestamp",
        ),
        (r#"{"job_type":"m","timeout":"0 s"}"#, "timeout"),
    ] {
        house.sql("TRUNCATE tenure.job, tenure.ready");
        let mut lines = [good; 10];
        lines[6] = bad;
        let input = lines.join("\n");
        let stopped = house.feed(&["enqueue", "--from", "-"], &input);
        assert_eq!(stopped.code, 2, "{}", stopped.err);
        assert!(stopped.err.contains("line 7: "), "{}", stopped.err);
        assert!(stopped.err.contains(says), "{}", stopped.err);
        assert!(stopped.err.contains("--start-line 7"), "{}", stopped.err);
        assert_eq!(count(&house), "6", "{bad}");
        let skipped = house.feed(
            &[
                "enqueue",
                "--from",
                "-",
                "--start-line",
                "7",
                "--rejects",
                rejects.to_str().unwrap(),
                "--output",
                "json",
            ],
            &input,
        );
        assert_eq!(skipped.code, 1, "{}", skipped.err);
        let answer: serde_json::Value =
            serde_json::from_str(skipped.out.lines().next().unwrap()).unwrap();
        assert_eq!(
            (&answer["data"]["enqueued"], &answer["data"]["rejected"]),
            (&json!(3), &json!(1)),
            "{answer}"
        );
        assert_eq!(fs::read_to_string(&rejects).unwrap(), format!("{bad}\n"));
        fs::remove_file(&rejects).unwrap();
        assert_eq!(count(&house), "9", "{bad}");
    }
}

#[test]
fn what_cannot_be_read_or_meant_is_said() {
    let house = House::new();
    for (arguments, code, says) in [
        (
            &["enqueue", "--from", "/nowhere"][..],
            2,
            "/nowhere cannot be read",
        ),
        (
            &["enqueue", "--from", "-", "--data", "1"],
            2,
            "cannot be used with",
        ),
        (&["enqueue", "--skip-bad"], 2, "--from"),
        (&["enqueue"], 2, "required"),
        (
            &["enqueue", "m", "--from", "-", "--rejects", "/nowhere/x"],
            2,
            "cannot be written",
        ),
    ] {
        let said = house.feed(arguments, "");
        assert_eq!(said.code, code, "{arguments:?}: {}", said.err);
        assert!(said.err.contains(says), "{arguments:?}: {}", said.err);
    }
    // The rejects of before may be the only record of those lines, and so may the input.
    let file = tempfile::NamedTempFile::new().unwrap();
    let path = file.path().to_str().unwrap();
    let said = house.run(&["enqueue", "m", "--from", path, "--rejects", path]);
    assert_eq!(said.code, 2, "{}", said.err);
    assert!(said.err.contains("exists"), "{}", said.err);
    let empty = house.json(&["enqueue", "m", "--from", "/dev/null"]);
    assert_eq!((&empty["read"], &empty["enqueued"]), (&json!(0), &json!(0)));
}

/// Many lines, while the server is killed and comes back: each is in once.
#[test]
fn an_outage_in_the_middle_is_waited_for() {
    let mut house = House::new();
    let lines = 60_000;
    let mut file = tempfile::NamedTempFile::new().unwrap();
    for n in 0..lines {
        writeln!(
            file,
            r#"{{"data":{{"n":{n},"filler":"{}"}}}}"#,
            "x".repeat(100)
        )
        .unwrap();
    }
    let child = house
        .command(&[
            "enqueue",
            "m",
            "--from",
            file.path().to_str().unwrap(),
            "--output",
            "json",
        ])
        .stdout(std::process::Stdio::piped())
        .stderr(std::process::Stdio::piped())
        .spawn()
        .unwrap();
    // Some batches are in, and others are not.
    while count(&house) == "0" {
        std::thread::sleep(std::time::Duration::from_millis(5));
    }
    house.server.kill9().unwrap();
    house.server.restart().unwrap();
    let output = child.wait_with_output().unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert_eq!(count(&house), lines.to_string());
    assert_eq!(
        house.sql("SELECT count(DISTINCT data ->> 'n') FROM tenure.job")[0][0].as_deref(),
        Some(lines.to_string().as_str())
    );
}
