//! Connections: a pool for the work, and single ones of their own for what must not wait behind it.
//!
//! Every wait on the network has a bound. A statement that passes its bound is cancelled on the server and its connection is
//! thrown away: it may still be busy with it.

use std::future::Future;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use deadpool_postgres::{
    Hook, HookError, Manager, ManagerConfig, Object, Pool, RecyclingMethod, Runtime, Timeouts,
};
use tokio::sync::{Mutex, OwnedMutexGuard, mpsc, watch};
use tokio::time::timeout;
use tokio_postgres::types::{ToSql, Type};
use tokio_postgres::{Client, NoTls, Row};
use tokio_postgres_rustls::MakeRustlsConnect;
use tracing::debug;

use crate::address::{Address, AddressError};
use crate::error::StoreError;
use crate::hosts;
use crate::route::{Along, Misled, Route};
use crate::tls::{self, TlsError};
use crate::wire::{detach, drive};

/// How to reach one installation.
#[derive(Clone)]
pub struct Target {
    /// Where the servers are.
    pub address: Address,
    /// The schema of the installation.
    pub schema: String,
    /// From the first packet until the server is ready for a query.
    pub connect_timeout: Duration,
    /// The longest that one statement may take.
    pub statement_timeout: Duration,
    /// Whether a pooler hands connections on after each transaction: then no session settings are made.
    pub pooled: bool,
}

impl std::fmt::Debug for Target {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} schema {}", self.address.servers(), self.schema)
    }
}

/// Why a [`Db`] or [`Session`] cannot be made from what was configured.
#[derive(Debug, thiserror::Error)]
pub enum TargetError {
    /// The address.
    #[error(transparent)]
    Address(#[from] AddressError),
    /// TLS.
    #[error(transparent)]
    Tls(#[from] TlsError),
    /// The pool.
    #[error("the connection pool cannot be made: {0}")]
    Pool(String),
}

/// Parameters of a statement with their types, so that it needs no name on the server and a pooler may stand between.
pub type Parameters<'p> = &'p [(&'p (dyn ToSql + Sync), Type)];

/// A pool of connections to one installation.
#[derive(Clone)]
pub struct Db {
    pool: Pool,
    target: Target,
    prefix: Arc<str>,
    tls: Option<MakeRustlsConnect>,
    route: Route,
    careful: Arc<Mutex<Option<Session>>>,
}

/// A session that is used by one at a time and notices a commit that did not wait for its synchronous standby.
pub struct Careful(OwnedMutexGuard<Option<Session>>);

impl std::ops::Deref for Careful {
    type Target = Session;

    fn deref(&self) -> &Session {
        match &*self.0 {
            Some(session) => session,
            None => unreachable!("it is there as long as the guard"),
        }
    }
}

/// One connection to one installation. All calls of the daemon are methods of it (see [`crate::worker`]).
///
/// Calls of one session that are polled together travel in one round trip.
pub struct Session {
    link: Option<Link>,
    prefix: Arc<str>,
    bound: Duration,
    tls: Option<MakeRustlsConnect>,
    broken: AtomicBool,
    /// Calls that have not come to their end; one that is dropped leaves the server busy with it.
    under_way: AtomicUsize,
    /// A commit did not wait for the synchronous standby: it was told not to. Of a connection of its own only.
    unreplicated: Arc<AtomicBool>,
    route: Option<Route>,
    /// Of the route, since this session was made.
    turns: Option<watch::Receiver<u64>>,
}

enum Link {
    Pooled(Object),
    Own(Client),
}

/// A notification that reached a session of its own: its payload. The channel closes when the connection ends.
pub type Notifications = mpsc::Receiver<String>;

impl Db {
    /// A pool of at most `size` connections; none is opened yet.
    ///
    /// # Errors
    /// TLS files that cannot be used.
    pub fn new(target: &Target, size: usize) -> Result<Self, TargetError> {
        Self::along(target, size, Route::to_any(target))
    }

    /// The same, to whichever server `route` leads at the moment. A connection from before it last turned is never lent out.
    ///
    /// # Errors
    /// TLS files that cannot be used.
    pub fn along(target: &Target, size: usize, route: Route) -> Result<Self, TargetError> {
        let method = ManagerConfig {
            recycling_method: RecyclingMethod::Fast,
        };
        let tls = tls_of(target)?;
        let along = Along {
            route: route.clone(),
            tls: tls.clone(),
        };
        let manager = Manager::from_connect(target.address.config.clone(), along, method);
        let settings = session_settings(target);
        let schema = prefix(&target.schema);
        let (checked, turned) = (route.clone(), route.clone());
        let bound = target.connect_timeout;
        let pool = Pool::builder(manager)
            .max_size(size.max(1))
            .runtime(Runtime::Tokio1)
            .timeouts(Timeouts {
                wait: Some(bound),
                create: Some(bound),
                recycle: Some(Duration::from_millis(500)),
            })
            .post_create(Hook::async_fn(move |client, _| {
                let (settings, route, schema) =
                    (settings.clone(), checked.clone(), Arc::clone(&schema));
                Box::pin(async move {
                    let settled = client.batch_execute(&settings).await;
                    settled.map_err(HookError::Backend)?;
                    Ok(route.check(client, &schema).await?)
                })
            }))
            .pre_recycle(Hook::sync_fn(move |_, metrics| {
                if turned.is_from_before(metrics.created) {
                    return Err(HookError::message("it leads to the primary of before"));
                }
                Ok(())
            }))
            .build()
            .map_err(|error| TargetError::Pool(error.to_string()))?;
        Ok(Self {
            pool,
            target: target.clone(),
            prefix: prefix(&target.schema),
            tls,
            route,
            careful: Arc::default(),
        })
    }

    /// The one connection for statements with [`crate::claim::Durability::Replicated`]; it is made when it is first asked for. A
    /// connection of the pool does not see the server's warning that a commit went on without its standby.
    ///
    /// # Errors
    /// `Unreachable` within the connect timeout.
    pub async fn careful(&self) -> Result<Careful, StoreError> {
        let mut held = Arc::clone(&self.careful).lock_owned().await;
        if !held.as_ref().is_some_and(Session::is_good) {
            *held = Some(Self::opened(&self.target, &self.route).await?);
        }
        Ok(Careful(held))
    }

    async fn opened(target: &Target, route: &Route) -> Result<Session, StoreError> {
        Ok(Session::open_along(target, route).await?.0)
    }

    /// A connection from the pool.
    ///
    /// # Errors
    /// `Unreachable` within twice the connect timeout.
    pub async fn session(&self) -> Result<Session, StoreError> {
        let mut turns = self.route.turns();
        let got = tokio::select! {
            got = self.pool.get() => got,
            // Whoever is waited for is not the primary any more.
            _ = turns.changed() => self.pool.get().await,
        };
        let object = got.map_err(|error| match error {
            deadpool_postgres::PoolError::Backend(error)
            | deadpool_postgres::PoolError::PostCreateHook(HookError::Backend(error)) => {
                StoreError::from(error)
            }
            deadpool_postgres::PoolError::Timeout(_) => StoreError::Unreachable(format!(
                "no connection to {} within {:?}",
                self.target.address.servers(),
                self.target.connect_timeout
            )),
            deadpool_postgres::PoolError::PostCreateHook(HookError::Message(why)) => {
                StoreError::ReadOnly(why.into_owned())
            }
            other => StoreError::Unreachable(other.to_string()),
        })?;
        Ok(Session {
            link: Some(Link::Pooled(object)),
            prefix: Arc::clone(&self.prefix),
            bound: self.target.statement_timeout,
            tls: self.tls.clone(),
            broken: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            unreplicated: Arc::default(),
            route: Some(self.route.clone()),
            turns: Some(turns),
        })
    }

    /// Throws the pool's idle connections away, as after a sign that the server went.
    pub fn forget_connections(&self) {
        self.pool.retain(|_, _| false);
    }

    /// What it speaks to.
    #[must_use]
    pub fn target(&self) -> &Target {
        &self.target
    }
}

impl Session {
    /// A connection of its own to a server that takes writes, with the notifications of the channels that it comes to listen on.
    ///
    /// # Errors
    /// `Unreachable` within the connect timeout.
    pub async fn open(target: &Target) -> Result<(Self, Notifications), StoreError> {
        hosts::open(target).await
    }

    /// The same to where `route` leads, which also says whether a statement that takes too long may be cancelled.
    ///
    /// # Errors
    /// `Unreachable` within the connect timeout.
    pub async fn open_along(
        target: &Target,
        route: &Route,
    ) -> Result<(Self, Notifications), StoreError> {
        // Should it be turned from here on, this session is turned away; and a server that is silent is not waited for.
        let mut turns = route.turns();
        let config = route.config();
        let (mut session, notifications) = tokio::select! {
            opened = Self::open_by(target, &config, Some(route.clone())) => opened?,
            _ = turns.changed() => {
                return Err(StoreError::Unreachable("another server became the primary".to_owned()));
            }
        };
        session.turns = Some(turns);
        Ok((session, notifications))
    }

    pub(crate) async fn open_by(
        target: &Target,
        config: &tokio_postgres::Config,
        route: Option<Route>,
    ) -> Result<(Self, Notifications), StoreError> {
        let (sender, receiver) = mpsc::channel(64);
        let tls = tls_of(target).map_err(|error| StoreError::Failed(error.to_string()))?;
        let unreplicated = Arc::new(AtomicBool::new(false));
        let noticed = Arc::clone(&unreplicated);
        let connecting = async {
            let client = match tls.clone() {
                None => {
                    let (client, connection) = config.connect(NoTls).await?;
                    drop(drive(connection, sender, noticed));
                    client
                }
                Some(tls) => {
                    let (client, connection) = config.connect(tls).await?;
                    drop(drive(connection, sender, noticed));
                    client
                }
            };
            client.batch_execute(&session_settings(target)).await?;
            if let Some(route) = &route {
                route.check(&client, &prefix(&target.schema)).await?;
            }
            // What a server warns of at the start, such as another version of its collations, is about no commit.
            unreplicated.store(false, Ordering::Relaxed);
            Ok::<_, Misled>(client)
        };
        let client = timeout(target.connect_timeout, connecting)
            .await
            .map_err(|_| {
                StoreError::Unreachable(format!(
                    "no connection to {} within {:?}",
                    target.address.servers(),
                    target.connect_timeout
                ))
            })??;
        let session = Self {
            link: Some(Link::Own(client)),
            prefix: prefix(&target.schema),
            bound: target.statement_timeout,
            tls,
            broken: AtomicBool::new(false),
            under_way: AtomicUsize::new(0),
            unreplicated,
            route,
            turns: None,
        };
        Ok((session, receiver))
    }

    /// Runs one statement. `%` in `sql` stands for the quoted schema and a dot; `what` names it in errors.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn rows(
        &self,
        what: &'static str,
        sql: &str,
        parameters: Parameters<'_>,
    ) -> Result<Vec<Row>, StoreError> {
        let sql = self.with_schema(sql);
        let client = self.client();
        self.bounded(what, client.query_typed(&sql, parameters))
            .await
    }

    /// `sql` with the quoted schema and a dot in place of each `%`.
    pub(crate) fn with_schema(&self, sql: &str) -> String {
        sql.replace('%', &self.prefix)
    }

    /// Runs statements without parameters, for migrations and LISTEN; nothing is replaced in them.
    ///
    /// # Errors
    /// See [`StoreError`].
    pub async fn batch(&self, what: &'static str, sql: &str) -> Result<(), StoreError> {
        self.bounded(what, self.client().batch_execute(sql)).await
    }

    /// The connection itself.
    #[must_use]
    pub fn client(&self) -> &Client {
        match &self.link {
            Some(Link::Pooled(object)) => object,
            Some(Link::Own(client)) => client,
            None => unreachable!("the link is only taken by drop"),
        }
    }

    /// Whether it leads to a server that is not the primary any more.
    #[must_use]
    pub fn is_turned_away(&self) -> bool {
        let turns = self.turns.as_ref();
        turns.is_some_and(|turns| turns.has_changed().unwrap_or(true))
    }

    /// Whether it may still be of use.
    fn is_good(&self) -> bool {
        !self.is_turned_away()
            && !self.client().is_closed()
            && !self.broken.load(Ordering::Relaxed)
            && self.under_way.load(Ordering::Relaxed) == 0
    }

    /// The same session with another bound for each statement.
    #[must_use]
    pub fn within(mut self, bound: Duration) -> Self {
        self.bound = bound;
        self
    }

    pub(crate) async fn bounded<T>(
        &self,
        what: &'static str,
        call: impl Future<Output = Result<T, tokio_postgres::Error>>,
    ) -> Result<T, StoreError> {
        self.under_way.fetch_add(1, Ordering::Relaxed);
        let answer = tokio::select! {
            answer = timeout(self.bound, call) => Some(answer),
            () = turned(self.turns.clone()) => None,
        };
        self.under_way.fetch_sub(1, Ordering::Relaxed);
        let Some(answer) = answer else {
            self.broken.store(true, Ordering::Relaxed);
            return Err(StoreError::Unreachable(
                "another server became the primary".to_owned(),
            ));
        };
        let unreplicated = self.unreplicated.swap(false, Ordering::Relaxed);
        let result = match answer {
            Ok(Ok(_)) if unreplicated => Err(StoreError::Unreplicated(what)),
            Ok(result) => result.map_err(StoreError::from),
            Err(_) => {
                self.cancel();
                Err(StoreError::Timeout(what))
            }
        };
        if result.as_ref().is_err_and(StoreError::breaks_connection) {
            self.broken.store(true, Ordering::Relaxed);
        }
        result
    }

    /// Asks the server to stop what it does for us; nobody waits for it.
    fn cancel(&self) {
        // A commit that waits for its standby is not undone by a cancel but shown without it. The closed connection leaves it waiting.
        if self.route.as_ref().is_some_and(Route::is_synchronous) {
            return;
        }
        let (token, tls, bound) = (self.client().cancel_token(), self.tls.clone(), self.bound);
        drop(detach(async move {
            let cancelled = async {
                match tls {
                    None => token.cancel_query(NoTls).await,
                    Some(tls) => token.cancel_query(tls).await,
                }
            };
            if timeout(bound, cancelled).await.is_err() {
                debug!("A cancel request was not answered.");
            }
        }));
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        let abandoned = self.under_way.load(Ordering::Relaxed) > 0;
        if abandoned {
            self.cancel();
        }
        if (abandoned || self.broken.load(Ordering::Relaxed))
            && let Some(Link::Pooled(object)) = self.link.take()
        {
            drop(Object::take(object));
        }
    }
}

/// Waits until the route is turned.
async fn turned(turns: Option<watch::Receiver<u64>>) {
    if let Some(mut turns) = turns
        && turns.changed().await.is_ok()
    {
        return;
    }
    std::future::pending::<()>().await;
}

fn tls_of(target: &Target) -> Result<Option<MakeRustlsConnect>, TlsError> {
    target.address.tls.as_ref().map(tls::connector).transpose()
}

/// Bounds on the server's side, below ours, so that nothing lives on there that nobody waits for; and none that an administrator has
/// set for sessions of another kind. A server that has no such setting is left alone.
fn session_settings(target: &Target) -> String {
    if target.pooled {
        return String::new();
    }
    let ms = target.statement_timeout.as_millis();
    format!(
        "SELECT set_config(name, value, false) FROM (VALUES ('statement_timeout', '{ms}'), ('lock_timeout', '{ms}'), \
         ('idle_in_transaction_session_timeout', '{ms}'), ('idle_session_timeout', '0'), ('transaction_timeout', '0'), ('client_connection_check_interval', '1000'), ('jit', 'off')) s(name, value) \
         WHERE EXISTS (SELECT FROM pg_catalog.pg_settings p WHERE p.name = s.name)"
    )
}

/// `"schema".`
fn prefix(schema: &str) -> Arc<str> {
    format!("\"{}\".", schema.replace('"', "\"\"")).into()
}
