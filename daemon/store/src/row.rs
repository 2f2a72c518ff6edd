//! Reading what a statement answered.

use std::time::Duration;

use tokio_postgres::Row;
use tokio_postgres::types::FromSql;

use crate::error::StoreError;
use crate::value::RawJson;

pub(crate) fn get<'r, T: FromSql<'r>>(row: &'r Row, column: &str) -> Result<T, StoreError> {
    row.try_get(column).map_err(StoreError::from)
}

pub(crate) fn list<T: serde::de::DeserializeOwned>(
    row: &Row,
    column: &str,
) -> Result<Vec<T>, StoreError> {
    let text: Option<RawJson> = get(row, column)?;
    text.map_or(Ok(Vec::new()), |text| serde_json::from_str(&text.0))
        .map_err(|error| StoreError::Failed(format!("{column}: {error}")))
}

pub(crate) fn next_due(row: &Row) -> Result<Option<Duration>, StoreError> {
    let ms: Option<i64> = get(row, "next_due_ms")?;
    Ok(ms.map(|ms| Duration::from_millis(u64::try_from(ms).unwrap_or(0))))
}
