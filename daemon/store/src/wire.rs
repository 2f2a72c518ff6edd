//! What drives a connection while its session asks and answers.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::sync::mpsc;
use tokio::task::JoinHandle;
use tokio_postgres::AsyncMessage;
use tokio_postgres::error::SqlState;
use tracing::debug;

/// Drives a connection until it ends, handing its notifications on. A receiver that does not keep up loses some: they are hints.
pub(crate) fn drive<S, T>(
    mut connection: tokio_postgres::Connection<S, T>,
    sender: mpsc::Sender<String>,
    unreplicated: Arc<AtomicBool>,
) -> JoinHandle<()>
where
    S: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
    T: tokio::io::AsyncRead + tokio::io::AsyncWrite + Unpin + Send + 'static,
{
    detach(async move {
        loop {
            match std::future::poll_fn(|context| connection.poll_message(context)).await {
                Some(Ok(AsyncMessage::Notification(notification))) => {
                    let _ = sender.try_send(notification.payload().to_owned());
                }
                Some(Ok(AsyncMessage::Notice(notice))) => {
                    debug!(notice = notice.message(), "The server says something.");
                    // "canceling wait for synchronous replication", in the server's language; it comes before the answer.
                    // Warnings of our own functions have the same code.
                    if *notice.code() == SqlState::WARNING
                        && !notice.message().starts_with("tenure:")
                    {
                        unreplicated.store(true, Ordering::Relaxed);
                    }
                }
                Some(Ok(_)) => {}
                Some(Err(error)) => {
                    debug!(error = %crate::error::chain(&error), "A connection ended.");
                    break;
                }
                None => break,
            }
        }
    })
}

/// Connections drive themselves until they end; there is nothing to wait for.
#[expect(
    clippy::disallowed_methods,
    reason = "ends with its connection, and has nothing to drain"
)]
pub(crate) fn detach<T: Send + 'static>(
    task: impl Future<Output = T> + Send + 'static,
) -> JoinHandle<T> {
    tokio::spawn(task)
}
