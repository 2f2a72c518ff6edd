//! PgBouncer in transaction mode, between daemons and a server.

use std::fs;
use std::process::Command;

use nix::unistd::Uid;
use tempfile::TempDir;
use tenure_embedded::free_port;

use crate::service::Service;

/// A running PgBouncer. Dropping it ends it.
#[derive(Debug)]
pub struct Pooler {
    _service: Service,
    _folder: TempDir,
    port: u16,
}

impl Pooler {
    /// Starts one with two connections to the database `app` of the server, or of what leads to one, on port `to`.
    ///
    /// # Panics
    /// When it does not start.
    #[must_use]
    pub fn start(to: u16) -> Self {
        let port = free_port().expect("a port is free");
        let folder = tempfile::tempdir().expect("there is room for files");
        let config = folder.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\napp = host=127.0.0.1 port={to} user=postgres\n[pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\n\
             unix_socket_dir =\nauth_type = any\npool_mode = transaction\ndefault_pool_size = 2\n"
        );
        fs::write(&config, text).expect("a file can be written");
        let config = fs::File::open(&config).expect("a file can be read");
        let mut command = pgbouncer();
        command.arg("/dev/stdin");
        let mut service = Service::start_with("PgBouncer", command, config, folder.path());
        service.until_it_listens(port);
        Self {
            _service: service,
            _folder: folder,
            port,
        }
    }

    /// Where to connect to.
    #[must_use]
    pub fn url(&self) -> String {
        format!("postgres://postgres@127.0.0.1:{}/app", self.port)
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
