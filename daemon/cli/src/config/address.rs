//! The address of the database, as far as it must be understood before anybody connects.

use std::time::Duration;

use tenure_store::address::Address;

/// Refuses what is no address of a PostgreSQL database. The message never holds any of it.
pub(crate) fn check(url: &str) -> Result<(), String> {
    parse(url).map(|_| ()).map_err(|error| error.to_string())
}

/// Whether `url` names one host only: then a switch of the primary is waited out there, which takes longer.
pub(crate) fn names_one_host(url: &str) -> bool {
    parse(url).is_ok_and(|address| {
        address
            .config
            .get_hosts()
            .windows(2)
            .all(|pair| pair[0] == pair[1])
    })
}

/// The servers that `url` names, for people.
pub(crate) fn servers(url: &str) -> String {
    parse(url).map_or_else(|_| String::new(), |address| address.servers())
}

fn parse(url: &str) -> Result<Address, tenure_store::address::AddressError> {
    // The timeout is none of the address: it is put in where the connections are made.
    Address::parse(url, None, Duration::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hosts_are_told_apart() {
        assert!(!names_one_host(
            "postgres://tenure@pg1,pg2:5432/app?sslmode=disable"
        ));
        assert!(names_one_host(
            "postgres://u:p%40ss@db:5432,db:5433/app?sslmode=disable"
        ));
        assert!(names_one_host("postgres://[::1]:5432/app"));
    }
}
