//! `tenure selftest` on its own servers and on a cluster of somebody else's.

use tenure_embedded::{Options, Server};

use crate::house::{House, Said, binary};

/// Long enough for one fault, which comes within 3.5 s, and no more: two lie further apart.
const ONE_FAULT: [&str; 3] = ["selftest", "--for", "3600ms"];

fn result(said: &Said) -> serde_json::Value {
    let answer: serde_json::Value = serde_json::from_str(&said.out)
        .unwrap_or_else(|error| panic!("{error}: {}\n{}", said.out, said.err));
    answer["data"].clone()
}

fn selftest(url: &str, more: &[&str]) -> Said {
    let mut command = binary();
    command
        .args(ONE_FAULT)
        .args(["--output", "json"])
        .args(more);
    command.env("TENURE_DATABASE__URL", url);
    command.output().unwrap().into()
}

#[test]
fn its_own_servers() {
    let said = selftest("postgres://nobody@127.0.0.1:1/none", &["--daemons", "2"]);
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    let result = result(&said);
    assert_eq!((&result["lost"], &result["twice"]), (&0.into(), &0.into()));
    assert!(result["acknowledged"].as_u64().unwrap() > 20, "{result}");
    let faults = result["faults"].as_array().unwrap();
    assert_eq!(faults.len(), 1, "{result}");
    assert_eq!(faults[0]["runs"], 1, "{result}");
}

/// A primary with a standby, and commands that kill the one and promote the other.
#[test]
fn a_cluster_of_ones_own() {
    let mut options = Options::for_tests();
    options.settings = Server::cluster_settings();
    let primary = Server::start(options).unwrap();
    primary.create_database("app").unwrap();
    let standby = primary.standby().unwrap();
    let (first, second) = (primary.port(), standby.port());
    let url = format!("postgres://postgres@127.0.0.1:{first},127.0.0.1:{second}/app");
    let promote = format!(
        "test $TENURE_PRIMARY = 127.0.0.1:{first} && kill -9 $(head -1 {}/postmaster.pid) && \
         psql -qXtA -h 127.0.0.1 -p {second} -U postgres -c 'SELECT pg_promote()'",
        primary.data_dir().display()
    );
    let said = selftest(
        &url,
        &[
            "--this-cluster",
            "--spare-daemons",
            "--kill-primary",
            &promote,
            "--restore",
            "test $TENURE_PRIMARY",
        ],
    );
    assert_eq!(said.code, 0, "{}\n{}", said.out, said.err);
    let result = result(&said);
    let fault = &result["faults"][0];
    assert_eq!(
        (&fault["name"], &fault["runs"]),
        (&"primary killed".into(), &1.into())
    );
    assert_eq!(
        fault["without_primary_seconds"].as_array().unwrap().len(),
        1
    );
    assert_eq!((&result["lost"], &result["twice"]), (&0.into(), &0.into()));
    // Nothing is left behind.
    let left = standby
        .sql("app")
        .unwrap()
        .run("SELECT FROM pg_namespace WHERE nspname LIKE 'tenure%'");
    assert!(left.unwrap().is_empty());
}

#[test]
fn a_database_that_holds_jobs_is_refused() {
    let house = House::new();
    // An empty installation is in nobody's way, and neither are faults that fail.
    let fails = [
        "--this-cluster",
        "--spare-daemons",
        "--fault",
        "odd=echo why; exit 3",
    ];
    let said = selftest(&house.server.url("app", "postgres"), &fails);
    assert_eq!(said.code, 1, "{}", said.out);
    assert!(
        said.out
            .contains("`echo why; exit 3` failed (exit status: 3)")
            && said.err.contains("why"),
        "{}",
        said.out
    );
    house.ok(&["enqueue", "settle"]);
    let said = house.run(&["selftest", "--this-cluster"]);
    assert_eq!(said.code, 4, "{}", said.err);
    assert!(
        said.err
            .contains("holds jobs or workers of others, in the schema tenure"),
        "{}",
        said.err
    );
    let said = house.run(&["selftest", "--this-cluster", "--spare-daemons"]);
    assert_eq!(said.code, 2, "{}", said.err);
    // Faults of servers that are not named as such are a mistake.
    let said = house.run(&["selftest", "--kill-primary", "true"]);
    assert_eq!(said.code, 2, "{}", said.err);
}
