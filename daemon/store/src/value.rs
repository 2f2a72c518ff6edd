//! Values that pass through as PostgreSQL gives them.

use std::error::Error;
use std::time::{Duration, SystemTime};

use bytes::{BufMut, BytesMut};
use tokio_postgres::types::{FromSql, IsNull, ToSql, Type, accepts, to_sql_checked};

/// The text of a `jsonb` value, never parsed on the way: numbers keep their digits.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RawJson(pub String);

impl<'a> FromSql<'a> for RawJson {
    fn from_sql(_: &Type, raw: &'a [u8]) -> Result<Self, Box<dyn Error + Sync + Send>> {
        // The first byte is the version of the format: 1, text.
        match raw {
            [1, text @ ..] => Ok(Self(std::str::from_utf8(text)?.to_owned())),
            _ => Err("a jsonb value in an unknown format".into()),
        }
    }

    accepts!(JSONB);
}

impl ToSql for RawJson {
    fn to_sql(&self, _: &Type, out: &mut BytesMut) -> Result<IsNull, Box<dyn Error + Sync + Send>> {
        out.put_u8(1);
        out.put_slice(self.0.as_bytes());
        Ok(IsNull::No)
    }

    accepts!(JSONB);
    to_sql_checked!();
}

/// How long after `earlier` a moment of the database's clock is; zero when it is before.
#[must_use]
pub fn since(earlier: SystemTime, later: SystemTime) -> Duration {
    later.duration_since(earlier).unwrap_or_default()
}
