//! Where the pool connects to: the primary of the moment.
//!
//! Whoever finds the primary turns the route; connections from before are then not lent out any more, and new ones go to the new
//! server. Until it was first turned it leads to whichever host of the address takes writes.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use deadpool_postgres::HookError;
use futures_util::FutureExt as _;
use futures_util::future::BoxFuture;
use tenure_core::primary::Facts;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use tokio_postgres::types::Type;
use tokio_postgres::{Client, Config, NoTls};
use tokio_postgres_rustls::MakeRustlsConnect;
use uuid::Uuid;

use crate::error::StoreError;
use crate::session::Target;
use crate::wire::drive;

/// See the module. All copies lead to the same server.
#[derive(Clone, Debug)]
pub struct Route(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    lead: Mutex<Lead>,
    synchronous: AtomicBool,
    /// How often it was turned.
    turns: watch::Sender<u64>,
}

#[derive(Debug)]
struct Lead {
    config: Config,
    turned_at: Instant,
    /// What it is; connections to one that this one has replaced are refused.
    server: Option<Facts>,
}

impl Route {
    /// To any host of the target that takes writes.
    #[must_use]
    pub fn to_any(target: &Target) -> Self {
        Self(Arc::new(Shared {
            lead: Mutex::new(Lead {
                config: target.address.config.clone(),
                turned_at: now(),
                server: None,
            }),
            synchronous: AtomicBool::new(false),
            turns: watch::Sender::new(0),
        }))
    }

    /// From now on to this host of the target, and to no server that may not stand for `server`; no host: to any that takes writes, where
    /// the hosts are not those that were looked at. What is under way on connections from before ends.
    pub fn turn(&self, target: &Target, host: Option<usize>, server: Option<Facts>) {
        *self.lead() = Lead {
            config: host.map_or_else(
                || target.address.config.clone(),
                |host| target.address.at(host).config,
            ),
            turned_at: now(),
            server,
        };
        self.0.turns.send_modify(|turns| *turns += 1);
    }

    /// Sees the next turn.
    pub(crate) fn turns(&self) -> watch::Receiver<u64> {
        let mut turns = self.0.turns.subscribe();
        turns.mark_unchanged();
        turns
    }

    /// Whether the server has synchronous standbys.
    pub fn set_synchronous(&self, synchronous: bool) {
        self.0.synchronous.store(synchronous, Ordering::Relaxed);
    }

    pub(crate) fn is_synchronous(&self) -> bool {
        self.0.synchronous.load(Ordering::Relaxed)
    }

    pub(crate) fn config(&self) -> Config {
        self.lead().config.clone()
    }

    /// Whether a connection that was made then may lead elsewhere.
    pub(crate) fn is_from_before(&self, created: Instant) -> bool {
        created < self.lead().turned_at
    }

    /// Refuses a connection to a server that was replaced, or is none of ours: the name may have led to it.
    pub(crate) async fn check(&self, client: &Client, prefix: &str) -> Result<(), Misled> {
        let Some(server) = self.lead().server else {
            return Ok(());
        };
        let sql =
            format!("SELECT system_id, timeline, instead_of, installation FROM {prefix}probe($1)");
        let rows = client
            .query_typed(&sql, &[(&Uuid::nil(), Type::UUID)])
            .await?;
        let Some(row) = rows.first() else {
            return Ok(());
        };
        let found = Facts {
            system: row.try_get("system_id")?,
            timeline: row.try_get("timeline")?,
            instead_of: row.try_get("instead_of")?,
            installation: row.try_get("installation")?,
            ..Facts::default()
        };
        if found.stands_for(&server) {
            Ok(())
        } else {
            Err(Misled::Elsewhere)
        }
    }

    fn lead(&self) -> MutexGuard<'_, Lead> {
        self.0.lead.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "compared with the pool's own note of when it made a connection"
)]
fn now() -> Instant {
    Instant::now()
}

/// Why a new connection is of no use.
#[derive(Debug, thiserror::Error)]
pub(crate) enum Misled {
    /// It leads to a server that was the primary before, or to another one altogether.
    #[error(
        "this server is not the primary that was found: it was one before, or is another system"
    )]
    Elsewhere,
    /// It broke.
    #[error(transparent)]
    Broken(#[from] tokio_postgres::Error),
}

impl From<Misled> for StoreError {
    fn from(misled: Misled) -> Self {
        match misled {
            Misled::Elsewhere => Self::ReadOnly(misled.to_string()),
            Misled::Broken(error) => error.into(),
        }
    }
}

impl From<Misled> for HookError {
    fn from(misled: Misled) -> Self {
        match misled {
            Misled::Elsewhere => Self::message(misled.to_string()),
            Misled::Broken(error) => Self::Backend(error),
        }
    }
}

/// Makes the pool's connections.
pub(crate) struct Along {
    pub(crate) route: Route,
    pub(crate) tls: Option<MakeRustlsConnect>,
}

impl deadpool_postgres::Connect for Along {
    fn connect(
        &self,
        _: &Config,
    ) -> BoxFuture<'_, Result<(Client, JoinHandle<()>), tokio_postgres::Error>> {
        let (config, tls) = (self.route.config(), self.tls.clone());
        async move {
            // Nobody listens on these.
            let (nobody, _) = mpsc::channel(1);
            Ok(match tls {
                None => {
                    let (client, connection) = config.connect(NoTls).await?;
                    (client, drive(connection, nobody, Arc::default()))
                }
                Some(tls) => {
                    let (client, connection) = config.connect(tls).await?;
                    (client, drive(connection, nobody, Arc::default()))
                }
            })
        }
        .boxed()
    }
}
