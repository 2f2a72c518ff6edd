//! Three PostgreSQL nodes under Patroni, with one etcd.
//!
//! Each node has a PID namespace of its own, so that killing its first process is the loss of a host. In there a shell starts Patroni,
//! again and again, unless a file named `hold` is in its folder.

use std::fs;
use std::process::Command;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, Uid};
use serde_json::{Value, json};
use tempfile::TempDir;
use tenure_embedded::{Programs, Sql, SqlError, children};

use crate::fleet::free_ports;
use crate::http;
use crate::lab::{nap, wait_for};
use crate::servers::Servers;
use crate::service::Service;

/// How long a server may take to answer a question.
const SILENCE: Duration = Duration::from_secs(1);

/// How long a primary may be away for a restart that nobody has asked for.
const RESTART: Duration = Duration::from_secs(10);

/// A switchover is answered when it is over.
const SWITCHOVER: Duration = Duration::from_secs(60);

/// $1 is the node's folder, $2 its user, if it is not this one. The first process of a namespace also takes in its orphans.
const NODE: &str = r#"
while :; do
    if [ -e "$1/hold" ]; then
        sleep 0.2
    else
        ${2:+setpriv --reuid="$2" --regid="$2" --init-groups} patroni "$1/patroni.yml"
        sleep 0.1
    fi
done
"#;

/// One node, whose host is up or not.
#[derive(Debug)]
struct Node {
    host: Option<Service>,
    port: u16,
    rest: u16,
    folder: TempDir,
}

/// See the module. Everything ends when it is dropped.
#[derive(Debug)]
pub struct Patroni {
    nodes: Vec<Node>,
    programs: Programs,
    _etcd: Service,
    _etcd_folder: TempDir,
    reign: Reign,
}

/// The time of one primary. A restart begins another one.
#[derive(Debug, Clone, Default, PartialEq, PartialOrd)]
struct Reign {
    timeline: u32,
    /// When the server started, in seconds since 1970.
    since: f64,
    port: u16,
}

impl Patroni {
    /// Starts all, and waits until one is the leader and two stream from it. Under `synchronous` a commit waits for one of them.
    ///
    /// # Panics
    /// When a part is missing or does not start.
    #[must_use]
    pub fn start(synchronous: bool) -> Self {
        let programs = Programs::find().expect("PostgreSQL is installed");
        let patroni = Command::new("patroni").arg("--version").output();
        patroni.expect("Patroni is installed (scripts/setup test)");
        let etcd_folder = tempfile::tempdir().expect("there is room for files");
        let ports = free_ports(2);
        let etcd = etcd(ports[0], ports[1], &etcd_folder);
        let nodes = (1..=3)
            .map(|number| {
                let mut node = Node::new(number, ports[0], synchronous, &programs);
                node.start(&programs);
                node
            })
            .collect();
        let mut patroni = Self {
            nodes,
            programs,
            _etcd: etcd,
            _etcd_folder: etcd_folder,
            reign: Reign::default(),
        };
        patroni.until_whole();
        patroni.until_another_reign();
        if synchronous {
            patroni.until_synchronous();
        }
        patroni
    }

    /// The ports of the servers.
    #[must_use]
    pub fn ports(&self) -> Vec<u16> {
        self.nodes.iter().map(|node| node.port).collect()
    }

    /// The ports of the servers, and with each that of its Patroni.
    pub(crate) fn checked_ports(&self) -> Vec<(u16, u16)> {
        self.nodes
            .iter()
            .map(|node| (node.port, node.rest))
            .collect()
    }

    /// Waits until one node leads and two stream from it.
    pub fn until_whole(&self) {
        self.until_members("are one leader and two that stream", |members| {
            let is = |key: &str, wanted: &[&str]| {
                let is =
                    |member: &&Value| wanted.contains(&member[key].as_str().unwrap_or_default());
                members.iter().filter(is).count()
            };
            is("role", &["leader"]) == 1 && is("state", &["running", "streaming"]) == 3
        });
    }

    /// Waits until Patroni has chosen a synchronous standby. Without one, nobody succeeds a leader that is lost.
    pub fn until_synchronous(&self) {
        self.until_members("are synchronous", |members| {
            members
                .iter()
                .any(|member| member["role"] == "sync_standby")
        });
    }

    fn until_members(&self, what: &str, wanted: impl Fn(&[Value]) -> bool) {
        let check = || {
            let seen = self.nodes.iter().find_map(|node| {
                let cluster = http::get(node.rest, "/cluster", SILENCE)?;
                cluster["members"].as_array().cloned()
            });
            match seen {
                Some(members) if wanted(&members) => Ok(()),
                seen => Err(format!("{seen:?} {what}")),
            }
        };
        wait_for(check, || self.logged());
    }

    /// Waits until another server is the primary than before, or the same one has started again.
    pub(crate) fn until_another_reign(&mut self) {
        let before = self.reign.clone();
        let mut after = None;
        let check = || {
            let now = self.nodes.iter().filter_map(Node::reign);
            let newest = now.max_by(|one, other| one.partial_cmp(other).expect("a time"));
            after = newest.filter(|reign| {
                reign.timeline > before.timeline
                    || reign.port == before.port && reign.since > before.since
            });
            after
                .as_ref()
                .map_or(Err(format!("no primary after {before:?}")), |_| Ok(()))
        };
        wait_for(check, || self.logged());
        self.reign = after.expect("that was waited for");
    }

    fn leader(&mut self) -> &mut Node {
        let port = self.reign.port;
        let found = self.nodes.iter_mut().find(|node| node.port == port);
        found.expect("the primary is one of the nodes")
    }

    /// A planned switchover to another node.
    ///
    /// # Panics
    /// When Patroni refuses.
    pub fn switch_over(&mut self) {
        let (leader, rest) = (self.leader().name(), self.leader().rest);
        let (status, said) =
            http::post(rest, "/switchover", &json!({"leader": leader}), SWITCHOVER)
                .expect("Patroni answers");
        assert_eq!(status, 200, "{said}");
    }

    /// SIGKILL for the primary's postmaster. Its Patroni starts it again.
    pub fn kill_server(&mut self) {
        self.leader().signal_server(Signal::SIGKILL);
    }

    /// SIGKILL for the leader's Patroni, which is not started again before [`Patroni::release`]. The server is left alone.
    pub fn kill_patroni(&mut self) {
        let leader = self.leader();
        fs::write(leader.hold(), "").expect("a file can be made");
        leader.signal_patroni(Signal::SIGKILL);
    }

    /// Lets Patroni start again where it was killed.
    pub fn release(&mut self) {
        for node in &self.nodes {
            // Only one has it.
            let _ = fs::remove_file(node.hold());
        }
    }

    /// SIGSTOP for the leader's Patroni; the server is left alone. Returns the node, for [`Patroni::replace_patroni`].
    pub fn freeze_patroni(&mut self) -> u16 {
        self.leader().signal_patroni(Signal::SIGSTOP);
        self.reign.port
    }

    /// SIGKILL for the frozen Patroni of this node, which is started again at once, as a watchdog or a person would do it.
    ///
    /// SIGCONT would be a lottery: a Patroni 3.0.2 that goes on may write the leader key whoever has it by then. The new primary steps down,
    /// and the old one goes on with its lower timeline (seen in about one of five runs, also when it was stopped between two turns of its loop).
    pub fn replace_patroni(&mut self, port: u16) {
        let node = self.nodes.iter().find(|node| node.port == port);
        node.expect("it is one of the nodes")
            .signal_patroni(Signal::SIGKILL);
    }

    /// Kills everything on the leader's host. Returns the node, for [`Patroni::return_host`].
    pub fn lose_host(&mut self) -> u16 {
        let leader = self.leader();
        leader.host = None;
        // It names a process of a namespace that is gone.
        let _ = fs::remove_file(leader.folder.path().join("data/postmaster.pid"));
        self.reign.port
    }

    /// Starts a lost host again.
    pub fn return_host(&mut self, port: u16) {
        let node = self.nodes.iter_mut().find(|node| node.port == port);
        node.expect("it is one of the nodes").start(&self.programs);
    }
}

impl Servers for Patroni {
    fn log_in(&self, database: &str) -> Result<Sql, SqlError> {
        let begun = Instant::now();
        loop {
            match Sql::connect(self.reign.port, database, "postgres") {
                // Patroni may reload or restart it.
                Err(SqlError::Connection(_)) if begun.elapsed() < RESTART => nap(),
                answer => return answer,
            }
        }
    }

    fn primary(&self) -> u16 {
        self.reign.port
    }

    fn logged(&self) -> String {
        let logs = self.nodes.iter().map(|node| node.logged());
        logs.collect()
    }
}

impl Node {
    fn new(number: u16, etcd: u16, synchronous: bool, programs: &Programs) -> Self {
        let folder = programs.folder().expect("a folder can be made");
        let ports = free_ports(2);
        let node = Self {
            host: None,
            port: ports[0],
            rest: ports[1],
            folder,
        };
        let path = node.folder.path().display();
        let config = json!({
            "scope": "tenure",
            "name": format!("n{number}"),
            "restapi": {
                "listen": format!("127.0.0.1:{}", node.rest),
                "connect_address": format!("127.0.0.1:{}", node.rest),
            },
            "etcd3": { "hosts": [format!("127.0.0.1:{etcd}")] },
            "bootstrap": {
                "dcs": {
                    "ttl": 20,
                    "loop_wait": 1,
                    // As long as `ttl` lets it: on a busy machine a leader must not step down because etcd is slow.
                    "retry_timeout": 9,
                    "synchronous_mode": synchronous,
                    "postgresql": {
                        "use_pg_rewind": true,
                        "parameters": {
                            "wal_log_hints": "on",
                            "max_connections": 60,
                            "wal_keep_size": "256MB",
                        },
                    },
                },
                "initdb": ["no-sync", {"auth": "trust"}, {"username": "postgres"}],
            },
            "postgresql": {
                "listen": format!("127.0.0.1:{}", node.port),
                "connect_address": format!("127.0.0.1:{}", node.port),
                "data_dir": format!("{path}/data"),
                "bin_dir": programs.bin_dir(),
                "pgpass": format!("{path}/pgpass"),
                "authentication": {
                    "superuser": {"username": "postgres"},
                    "replication": {"username": "replicator", "password": "replicator"},
                },
                "parameters": {
                    "unix_socket_directories": path.to_string(),
                    "fsync": "off",
                    "wal_retrieve_retry_interval": "200ms",
                },
                "pg_hba": [
                    "local all all trust",
                    "host all all 127.0.0.1/32 trust",
                    "host replication all 127.0.0.1/32 trust",
                ],
            },
        });
        // JSON is YAML.
        fs::write(node.folder.path().join("patroni.yml"), config.to_string())
            .expect("a file can be written");
        node
    }

    fn start(&mut self, programs: &Programs) {
        let mut command = Command::new("unshare");
        if !Uid::effective().is_root() {
            command.args(["--user", "--map-user=1000", "--map-group=1000"]);
        }
        command.args(["--pid", "--fork", "--mount-proc", "--kill-child", "--"]);
        command
            .args(["sh", "-c", NODE, "node"])
            .arg(self.folder.path())
            .arg(programs.other_user().unwrap_or_default());
        self.host = Some(Service::start("Patroni", command, self.folder.path()));
    }

    fn logged(&self) -> String {
        let log = fs::read(self.folder.path().join("log")).unwrap_or_default();
        String::from_utf8_lossy(&log).into_owned()
    }

    fn name(&self) -> String {
        let config =
            fs::read_to_string(self.folder.path().join("patroni.yml")).expect("a file can be read");
        let config: Value = serde_json::from_str(&config).expect("it was written as JSON");
        config["name"].as_str().unwrap_or_default().to_owned()
    }

    fn hold(&self) -> std::path::PathBuf {
        self.folder.path().join("hold")
    }

    /// What it says as primary; nothing if it is none.
    fn reign(&self) -> Option<Reign> {
        let mut sql = Sql::connect_within(SILENCE, self.port, "postgres", "postgres").ok()?;
        let rows = sql.run(
            "SELECT ('x' || left(pg_walfile_name(pg_current_wal_lsn()), 8))::bit(32)::int, \
             extract(epoch FROM pg_postmaster_start_time()) WHERE NOT pg_is_in_recovery()",
        );
        match rows.ok()?.first()?.as_slice() {
            [Some(timeline), Some(since)] => Some(Reign {
                timeline: timeline.parse().ok()?,
                since: since.parse().ok()?,
                port: self.port,
            }),
            _ => None,
        }
    }

    fn signal_server(&self, signal: Signal) {
        self.signal("the server", signal, |name| name == "postgres");
    }

    fn signal_patroni(&self, signal: Signal) {
        self.signal("Patroni", signal, |name| name != "postgres");
    }

    /// Signals the one of the two that the first process of the host's namespace is the parent of.
    fn signal(&self, what: &str, signal: Signal, is: impl Fn(&str) -> bool) {
        let host = self.host.as_ref().expect("the host is up").pid();
        let pids: Vec<i32> = children(host)
            .into_iter()
            .flat_map(children)
            .filter(|pid| {
                let name = fs::read_to_string(format!("/proc/{pid}/comm"));
                name.is_ok_and(|name| is(name.trim_end()))
            })
            .collect();
        let [pid] = pids[..] else {
            panic!("{what} is not one process: {pids:?}")
        };
        kill(Pid::from_raw(pid), signal).expect("it can be signalled");
    }
}

fn etcd(client: u16, peer: u16, folder: &TempDir) -> Service {
    let (client_url, peer_url) = (
        format!("http://127.0.0.1:{client}"),
        format!("http://127.0.0.1:{peer}"),
    );
    let mut command = Command::new("etcd");
    command
        .arg("--data-dir")
        .arg(folder.path().join("data"))
        .args(["--listen-client-urls", &client_url])
        .args(["--advertise-client-urls", &client_url])
        .args(["--listen-peer-urls", &peer_url])
        .args(["--initial-advertise-peer-urls", &peer_url])
        .args(["--initial-cluster", &format!("default={peer_url}")]);
    let mut service = Service::start("etcd", command, folder.path());
    service.until_it_listens(client);
    service
}
