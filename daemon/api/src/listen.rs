//! Opening the address and serving on it until told to stop.

use std::io;
use std::os::unix::fs::{FileTypeExt, PermissionsExt};
use std::path::Path;
use std::time::Duration;

use axum::Router;
use tenure_runtime::settings::Listen;
use thiserror::Error;
use tokio::net::{TcpListener, UnixListener, UnixStream};
use tokio_util::sync::CancellationToken;

/// How long requests that are being answered may go on after the end was asked for.
const FAREWELL: Duration = Duration::from_secs(3);

/// An open address.
pub struct Listener {
    socket: Socket,
    address: Listen,
}

enum Socket {
    Tcp(TcpListener),
    Unix(UnixListener),
}

/// An address that cannot be opened.
#[derive(Debug, Error)]
#[error("api.listen: {address} cannot be opened: {why}")]
pub struct ListenError {
    address: Listen,
    why: String,
}

impl Listener {
    /// Opens `address`. A socket file that nobody listens on any more is replaced.
    ///
    /// # Errors
    /// When the address is taken, or this process may not open it.
    pub async fn open(address: &Listen) -> Result<Self, ListenError> {
        let opened = match address {
            Listen::Tcp(tcp) => TcpListener::bind(tcp).await.map(Socket::Tcp),
            Listen::Unix(path) => open_unix(path).await.map(Socket::Unix),
        };
        let failed = |error: io::Error| ListenError {
            address: address.clone(),
            why: match error.kind() {
                io::ErrorKind::AddrInUse => {
                    "another process listens there; choose another address, or \"off\"".to_owned()
                }
                _ => error.to_string(),
            },
        };
        let socket = opened.map_err(failed)?;
        let address = match &socket {
            Socket::Tcp(tcp) => Listen::Tcp(tcp.local_addr().map_err(failed)?),
            Socket::Unix(_) => address.clone(),
        };
        Ok(Self { socket, address })
    }

    /// The address, with the port that the system chose where the setting says 0.
    #[must_use]
    pub fn address(&self) -> &Listen {
        &self.address
    }

    /// Serves `router` until `stop`; then requests that are being answered get a few seconds.
    ///
    /// # Errors
    /// When the system refuses to accept connections.
    pub async fn serve(self, router: Router, stop: CancellationToken) -> io::Result<()> {
        let stopped = stop.clone().cancelled_owned();
        let path = match &self.address {
            Listen::Unix(path) => Some(path.clone()),
            Listen::Tcp(_) => None,
        };
        let serving = async {
            match self.socket {
                Socket::Tcp(socket) => {
                    axum::serve(socket, router)
                        .with_graceful_shutdown(stopped)
                        .await
                }
                Socket::Unix(socket) => {
                    axum::serve(socket, router)
                        .with_graceful_shutdown(stopped)
                        .await
                }
            }
        };
        let farewell = async {
            stop.cancelled().await;
            tokio::time::sleep(FAREWELL).await;
        };
        let served = tokio::select! {
            served = serving => served,
            () = farewell => Ok(()),
        };
        if let Some(path) = path {
            remove(&path);
        }
        served
    }
}

async fn open_unix(path: &Path) -> io::Result<UnixListener> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse && is_left_over(path).await => {
            std::fs::remove_file(path)?;
            UnixListener::bind(path)
        }
        opened => opened,
    }
    .and_then(|socket| {
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o660))?;
        Ok(socket)
    })
}

/// Whether `path` is a socket that nobody listens on.
async fn is_left_over(path: &Path) -> bool {
    let is_socket = std::fs::symlink_metadata(path).is_ok_and(|data| data.file_type().is_socket());
    is_socket
        && UnixStream::connect(path)
            .await
            .is_err_and(|error| error.kind() == io::ErrorKind::ConnectionRefused)
}

/// Takes the socket file away; the next start would replace it anyway.
fn remove(path: &Path) {
    if let Err(error) = std::fs::remove_file(path) {
        tracing::debug!(%error, path = %path.display(), "the API's socket file could not be removed");
    }
}
