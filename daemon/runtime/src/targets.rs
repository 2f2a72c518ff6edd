//! Where the database is: for the work, and past any pooler.

use tenure_store::address::{Address, AddressError};
use tenure_store::route::Route;
use tenure_store::session::Target;

use crate::lookout::Routes;
use crate::settings::{self, Pooler};

/// How to reach the database: for the work, and past any pooler.
///
/// # Errors
/// An address that is not understood.
pub fn targets(database: &settings::Database) -> Result<(Target, Target), AddressError> {
    let password = database.password.as_ref().map(settings::Secret::expose);
    let target = |url: &settings::Secret, pooled| {
        Ok(Target {
            address: Address::parse(url.expose(), password, database.connect_timeout)?,
            schema: database.schema.clone(),
            connect_timeout: database.connect_timeout,
            statement_timeout: database.statement_timeout,
            pooled,
        })
    };
    let pooled = database.pooler == Pooler::Transaction;
    let direct = database.direct_url.as_ref();
    Ok((
        target(&database.url, pooled)?,
        target(direct.unwrap_or(&database.url), pooled && direct.is_none())?,
    ))
}

/// Where connections lead until the primary is found, and how that is told to them.
pub(crate) fn routes(database: &settings::Database, target: &Target, direct: &Target) -> Routes {
    let to_servers = Route::to_any(direct);
    let pooler = database.direct_url.as_ref().map(|_| target.clone());
    Routes {
        pool: pooler
            .as_ref()
            .map_or_else(|| to_servers.clone(), Route::to_any),
        direct: to_servers,
        pooler,
    }
}
