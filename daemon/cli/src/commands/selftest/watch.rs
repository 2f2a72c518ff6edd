//! Looks which host is the primary, as a daemon does, and notes what each new one has.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use tenure_core::ids::Beat;
use tenure_core::primary::{Known, Primaries, Seen, Sight};
use tenure_core::time::Mono;
use tenure_store::error::StoreError;
use tenure_store::probe::Prober;
use tenure_store::session::{Session, Target};
use tenure_verdict::switches::Switch;
use tenure_verdict::uptime;
use tokio::sync::watch;

use super::notes::Notes;

/// The longest tail of commits that a switch is thought to lose. What is older is not looked at in each switch: a long test would fill the
/// memory with it.
const TAIL: Duration = Duration::from_secs(300);

/// From one round of questions to the next.
const STEP: Duration = Duration::from_millis(50);

/// Watches for ever. `present` is the host that is the primary; `None`: there is none.
pub(super) async fn watch(
    target: Target,
    notes: Arc<Notes>,
    present: watch::Sender<Option<usize>>,
) {
    let mut prober = Prober::new(&target);
    let mut primaries = Primaries::new(prober.hosts(), Seen::default());
    let known = Known {
        beat: Beat(0),
        epoch_no: 0,
    };
    let mut first = true;
    loop {
        let now = Mono::from_millis(u64::try_from(uptime().as_millis()).unwrap_or(u64::MAX));
        let shown = prober.round(None).await;
        let sights: Vec<Sight> = shown.into_iter().map(|shown| shown.sight).collect();
        let finding = primaries.on(now, now, &sights, known);
        if let Some(host) = finding.primary.filter(|_| finding.changed) {
            let writable = uptime();
            match look(&target, host, writable).await {
                // The first one has nothing that could have been lost.
                Ok(_) if std::mem::take(&mut first) => {}
                Ok(switch) => notes.switched(switch),
                // It is asked again: until then it counts as changed.
                Err(_) => primaries = Primaries::new(prober.hosts(), primaries.seen()),
            }
        }
        present.send_if_modified(|now| std::mem::replace(now, finding.primary) != finding.primary);
        tokio::time::sleep(STEP).await;
    }
}

/// What a new primary has.
async fn look(target: &Target, host: usize, writable: Duration) -> Result<Switch, StoreError> {
    let target = Target {
        address: target.address.at(host),
        ..target.clone()
    };
    let (session, _) = Session::open(&target).await?;
    let outcomes = ids(&session, "outcome").await?;
    let jobs = ids(&session, "job").await?;
    Ok(Switch {
        since: writable.saturating_sub(TAIL),
        fault: writable,
        writable,
        server: u16::try_from(host).unwrap_or(u16::MAX),
        jobs,
        outcomes,
    })
}

/// The ids of a table's young jobs. They are UUIDs of version 7, which begin with the time in milliseconds.
async fn ids(session: &Session, table: &str) -> Result<BTreeSet<String>, StoreError> {
    let sql = format!(
        "SELECT id::text FROM %{table} WHERE id > (lpad(to_hex((extract(epoch FROM clock_timestamp()) * 1000)::bigint - {}), 12, '0') || repeat('0', 20))::uuid",
        2 * TAIL.as_millis()
    );
    let rows = session.rows("look", &sql, &[]).await?;
    rows.iter().map(|row| Ok(row.try_get("id")?)).collect()
}
