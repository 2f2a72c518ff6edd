//! What all requests share.

use std::sync::Arc;
use std::time::Duration;

use metrics_exporter_prometheus::PrometheusHandle;

use tenure_runtime::completions::Completions;
use tenure_runtime::status::Status;
use tenure_store::session::Db;

use crate::access::Access;
use crate::queue::Queue;

/// What the interface needs.
pub struct State {
    /// Connections to the installation's database.
    pub db: Db,
    /// Who may speak.
    pub access: Access,
    /// The longest body of a request, in bytes.
    pub max_body: usize,
    /// Where handlers say how jobs ended that they had accepted.
    pub completions: Arc<Completions>,
    /// How the daemon is.
    pub status: Arc<Status>,
    /// How old its last confirmed heartbeat may be.
    pub heartbeat_limit: Duration,
    /// What `/metrics` prints.
    pub metrics: PrometheusHandle,
    /// What it prints of the whole queue.
    pub queue: Queue,
}

/// [`State`], shared by all requests.
pub(crate) type Shared = Arc<State>;
