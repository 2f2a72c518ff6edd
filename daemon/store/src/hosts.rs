//! One connection to whichever of several hosts is the primary, for whoever does not keep looking out for it.
//!
//! All hosts are tried at the same time, so one that is silent holds nobody up. Of several that take writes, the one wins that a person has
//! put in place of the others, or that has the highest timeline.

use std::time::Duration;

use futures_util::stream::{FuturesUnordered, StreamExt as _};
use tenure_core::primary::{Facts, Sight};
use tokio::time::timeout;

use crate::error::StoreError;
use crate::probe::Shown;
use crate::session::{Notifications, Session, Target};

/// After the first success the others are waited for so long: one of them may be the primary after the next switch.
const OTHERS: Duration = Duration::from_millis(200);

type Opened = (Session, Notifications);

/// Opens a connection to the primary.
///
/// # Errors
/// `Unreachable` within the connect timeout; with several hosts it says of each what was wrong.
pub(crate) async fn open(target: &Target) -> Result<Opened, StoreError> {
    let hosts = target.address.hosts();
    if hosts < 2 {
        return Session::open_by(target, &target.address.config, None).await;
    }
    let targets: Vec<Target> = (0..hosts)
        .map(|host| Target {
            address: target.address.at(host),
            ..target.clone()
        })
        .collect();
    let mut trying: FuturesUnordered<_> = targets
        .iter()
        .map(|target| async move {
            let opened = Session::open_by(target, &target.address.config, None).await;
            (target.address.servers(), opened)
        })
        .collect();
    let (mut found, mut errors) = (Vec::new(), Vec::new());
    loop {
        let next = if found.is_empty() {
            trying.next().await
        } else {
            timeout(OTHERS, trying.next()).await.unwrap_or(None)
        };
        match next {
            Some((_, Ok(opened))) => found.push(opened),
            Some((name, Err(error))) => errors.push((name, error)),
            None => break,
        }
    }
    newest(found).await.ok_or_else(|| because(&errors))
}

async fn newest(found: Vec<Opened>) -> Option<Opened> {
    if found.len() < 2 {
        return found.into_iter().next();
    }
    let mut best: Option<(Facts, Opened)> = None;
    for opened in found {
        let facts = opened.0.facts().await;
        if best.as_ref().is_none_or(|(other, _)| facts.outranks(other)) {
            best = Some((facts, opened));
        }
    }
    best.map(|(_, opened)| opened)
}

/// The one thing that all hosts said, such as a wrong password, or what each of them said.
fn because(errors: &[(String, StoreError)]) -> StoreError {
    let first = errors.first().map(|(_, error)| error.clone());
    match first {
        Some(first) if errors.iter().all(|(_, error)| *error == first) => first,
        _ => {
            let told = errors
                .iter()
                .map(|(name, error)| format!("{name}: {error}"));
            StoreError::Unreachable(told.collect::<Vec<_>>().join("; "))
        }
    }
}

impl Session {
    /// What the server is; of one that is not migrated its timeline alone.
    async fn facts(&self) -> Facts {
        if let Ok(Shown {
            sight: Sight::Primary(facts),
            ..
        }) = self.probe(None).await
        {
            return facts;
        }
        let sql = "SELECT ('x' || substr(pg_walfile_name(pg_current_wal_lsn()), 1, 8))::bit(32)::int AS timeline";
        let rows = self.rows("timeline", sql, &[]).await.unwrap_or_default();
        Facts {
            timeline: rows.first().and_then(|row| row.try_get("timeline").ok()),
            ..Facts::default()
        }
    }
}
