//! PgBouncer in transaction mode, between daemons and a server.

use std::fs;
use std::net::{Ipv4Addr, TcpStream};
use std::process::{Child, Command, Stdio};

use nix::unistd::Uid;
use tenure_embedded::free_port;

use crate::lab::Lab;

/// A running PgBouncer. Dropping it ends it.
#[derive(Debug)]
pub struct Pooler {
    child: Child,
    port: u16,
}

impl Pooler {
    /// Starts one with two connections to the lab's database.
    #[must_use]
    pub fn start(lab: &Lab) -> Self {
        let port = free_port().expect("a port is free");
        let config = lab.path("pgbouncer.ini");
        let text = format!(
            "[databases]\napp = host=127.0.0.1 port={} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n",
            lab.server.port()
        );
        fs::write(&config, text).expect("a file can be written");
        let log = fs::File::create(lab.path("pgbouncer.log")).expect("a file can be made");
        let config = fs::File::open(&config).expect("a file can be read");
        let child = pgbouncer()
            .arg("/dev/stdin")
            .stdin(config)
            .stdout(Stdio::null())
            .stderr(log)
            .spawn()
            .expect("PgBouncer is installed (scripts/setup test)");
        let pooler = Self { child, port };
        lab.wait_for(|| {
            TcpStream::connect((Ipv4Addr::LOCALHOST, port))
                .map(drop)
                .map_err(|error| format!("PgBouncer: {error}"))
        });
        pooler
    }

    /// Where to connect to.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/app", self.port)
    }
}

impl Drop for Pooler {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// It refuses to run as root.
fn pgbouncer() -> Command {
    if !Uid::effective().is_root() {
        return Command::new("pgbouncer");
    }
    let mut command = Command::new("setpriv");
    command.args([
        "--reuid=65534",
        "--regid=65534",
        "--clear-groups",
        "pgbouncer",
    ]);
    command
}
