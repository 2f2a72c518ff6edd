//! The server is there, and cannot or may not do what it is asked for.

use chaos_tests::{Disk, Lab, UNFINISHED, What, enqueue_many};
use tenure_embedded::{Options, Server, Sql};

const NAMES: [&str; 2] = ["a", "b"];

/// Neither WAL nor tables can grow. PostgreSQL refuses, or it stops and does not come back before there is room.
#[test]
fn the_disk_of_the_primary_is_full() {
    let disk = Disk::of(192);
    let mut options = Options {
        data_dir: Some(disk.path("data")),
        ..Lab::options()
    };
    options
        .settings
        .push(("max_wal_size".to_owned(), "32MB".to_owned()));
    let server = Server::start(options).unwrap();
    let url = server.url("app", "postgres");
    let mut lab = Lab::on(server, url);
    let daemons = NAMES.map(|name| lab.daemon(name, &[&lab.state_dir(name)]));
    lab.until_live(2);
    let mut jobs = lab.enqueue_many("ticks-20", 12);
    lab.until_witnessed(What::Tick, 20);
    disk.fill();
    // What still fits is taken.
    lab.wait_for(|| {
        let refused = lab
            .server
            .sql("app")
            .and_then(|mut sql| enqueue_many(&mut sql, "ticks-1", 20));
        match refused {
            Ok(more) => {
                jobs.extend(more);
                Err("there is room for more".to_owned())
            }
            Err(_) if lab.server_said("No space left on device").is_empty() => {
                Err("the disk is not what is wrong".to_owned())
            }
            Err(_) => Ok(()),
        }
    });
    // What runs then ends, one way or the other.
    lab.until_handlers_are_dead();
    disk.relieve();
    lab.server.restart().unwrap();
    lab.until(UNFINISHED, "0");
    lab.assert_sound(&jobs);
    for mut daemon in daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}

/// Others have taken all connections, also those that the daemons had.
#[test]
fn all_connection_slots_are_taken() {
    let lab = Lab::start();
    lab.run("CREATE ROLE plain LOGIN IN ROLE tenure_worker");
    let url = format!("database.url={}", lab.server.url("app", "plain"));
    let daemons = NAMES.map(|name| lab.daemon(name, &[&url]));
    lab.until_live(2);
    let mut jobs = lab.enqueue_many("ticks-30", 12);
    lab.until_witnessed(What::Tick, 12);
    let mut taken = Vec::new();
    lab.wait_for(|| {
        while let Ok(sql) = Sql::connect(lab.server.port(), "app", "plain") {
            taken.push(sql);
        }
        let cut = "SELECT count(pg_terminate_backend(pid)) FROM pg_stat_activity WHERE usename = 'plain' AND application_name LIKE 'tenure%' \
                   AND application_name <> 'tenure-embedded'";
        match lab.value(cut).as_str() {
            "0" => Ok(()),
            left => Err(format!("the daemons have {left} connections")),
        }
    });
    let full = Sql::connect(lab.server.port(), "app", "plain").unwrap_err();
    assert_eq!(full.code(), Some("53300"), "{full}");
    jobs.extend(lab.enqueue_many("ticks-1", 12));
    // What runs then ends, one way or the other.
    lab.until_handlers_are_dead();
    assert_ne!(lab.value(UNFINISHED), "0");
    taken.clear();
    lab.until(UNFINISHED, "0");
    lab.assert_sound(&jobs);
    for mut daemon in daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}

/// Meant for applications that forget their sessions, and set for all.
#[test]
fn the_administrator_has_set_timeouts() {
    let lab = Lab::start();
    for setting in [
        "idle_session_timeout = '500ms'",
        "statement_timeout = '200ms'",
        "lock_timeout = '100ms'",
        "idle_in_transaction_session_timeout = '100ms'",
    ] {
        lab.run(&format!("ALTER DATABASE app SET {setting}"));
    }
    lab.run("CREATE ROLE plain LOGIN IN ROLE tenure_worker");
    let url = format!("database.url={}", lab.server.url("app", "plain"));
    let mut daemon = lab.daemon("a", &[&url, "worker.heartbeat=3s", "worker.lease_ttl=20s"]);
    lab.until_live(1);
    let mut jobs = lab.enqueue_many("ticks-40", 4);
    lab.until(UNFINISHED, "0");
    jobs.extend(lab.enqueue_many("ticks-1", 4));
    lab.until(UNFINISHED, "0");
    assert_eq!(lab.count(What::Start), jobs.len());
    lab.assert_sound(&jobs);
    assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    let cut = lab.server_said("timeout");
    let ours: Vec<&String> = cut
        .iter()
        .filter(|line| line.contains("] tenure "))
        .collect();
    assert!(ours.is_empty(), "{ours:?}");
}

/// Somebody has locked a table, as `ALTER TABLE` or a forgotten transaction does: one after the other, and one for longer than trust lasts.
#[test]
fn a_lock_is_held_on_each_table() {
    let lab = Lab::start();
    let daemons = NAMES.map(|name| lab.daemon(name, &[]));
    lab.until_live(2);
    let tables: Vec<String> = lab
        .rows("SELECT tablename FROM pg_tables WHERE schemaname = 'tenure' ORDER BY 1")
        .into_iter()
        .flatten()
        .flatten()
        .collect();
    assert!(tables.len() > 15, "{tables:?}");
    let mut jobs = Vec::new();
    for table in &tables {
        jobs.extend(lab.enqueue_many("ticks-3", 6));
        jobs.extend(lab.enqueue_many("ticks-12", 2));
        let mut holder = lab.sql();
        holder
            .run(&format!(
                "BEGIN; LOCK TABLE tenure.{table} IN ACCESS EXCLUSIVE MODE"
            ))
            .unwrap();
        // A table that nobody needs meanwhile stops nobody: then the work goes on.
        let ended = lab.count(What::End);
        lab.wait_for(|| {
            let waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted";
            if lab.value(waiting) == "t" || lab.count(What::End) > ended + 6 {
                return Ok(());
            }
            Err(format!(
                "with {table} locked nobody waits, and nothing ends"
            ))
        });
        if table == "beat" {
            lab.until_handlers_are_dead();
        }
        holder.run("COMMIT").unwrap();
    }
    lab.until(UNFINISHED, "0");
    lab.assert_sound(&jobs);
    for mut daemon in daemons {
        assert_eq!(daemon.stop(), 0, "{}", daemon.log());
    }
}
