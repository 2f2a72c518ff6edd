//! HAProxy, which leads to whichever node says to its health check that it is the primary.

use std::fmt::Write as _;
use std::fs;
use std::process::Command;

use tempfile::TempDir;
use tenure_embedded::free_port;

use crate::patroni::Patroni;
use crate::service::Service;

/// A running HAProxy. Dropping it ends it.
#[derive(Debug)]
pub(crate) struct Balancer {
    _service: Service,
    _folder: TempDir,
    port: u16,
}

impl Balancer {
    /// Starts one in front of these nodes.
    pub(crate) fn start(patroni: &Patroni) -> Self {
        let port = free_port().expect("a port is free");
        let folder = tempfile::tempdir().expect("there is room for files");
        let config = folder.path().join("haproxy.cfg");
        // As Patroni's documentation has it.
        let mut text = format!(
            "global\n maxconn 500\ndefaults\n mode tcp\n retries 2\n timeout client 30m\n timeout server 30m\n timeout connect 4s\n \
             timeout check 1s\nlisten primary\n bind 127.0.0.1:{port}\n option httpchk OPTIONS /primary\n http-check expect status 200\n \
             default-server inter 500ms fall 2 rise 1 on-marked-down shutdown-sessions\n"
        );
        for (server, check) in patroni.checked_ports() {
            writeln!(
                text,
                " server p{server} 127.0.0.1:{server} check port {check}"
            )
            .expect("text takes more text");
        }
        fs::write(&config, text).expect("a file can be written");
        let mut command = Command::new("haproxy");
        command.arg("-db").arg("-f").arg(&config);
        let mut service = Service::start("HAProxy", command, folder.path());
        service.until_it_listens(port);
        Self {
            _service: service,
            _folder: folder,
            port,
        }
    }

    /// Where to connect to.
    pub(crate) fn port(&self) -> u16 {
        self.port
    }
}
