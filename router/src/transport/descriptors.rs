//! File descriptors: the limit of this process, and how many of them clients may take.
//!
//! A request needs a connection to its client and one to each of its workers. If clients could take
//! all descriptors, every connection to a worker would fail, which says nothing about the worker.

use std::io;

use rustix::io::Errno;
use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};

/// Descriptors for everything else: listeners, probes, logs, KV event streams.
const RESERVE: u64 = 64;

/// Raises the soft limit to the hard one; returns the limit, `None`: there is none.
pub fn raise_limit() -> Option<u64> {
    let Rlimit { current, maximum } = getrlimit(Resource::Nofile);
    if current == maximum {
        return current;
    }
    match setrlimit(
        Resource::Nofile,
        Rlimit {
            current: maximum,
            maximum,
        },
    ) {
        Ok(()) => maximum,
        Err(err) => {
            tracing::warn!(%err, ?current, ?maximum, "cannot raise the limit of open files");
            current
        }
    }
}

/// Connections that clients may hold at once: each leaves room for one connection to each of `legs`
/// workers.
pub fn client_connections(limit: Option<u64>, wanted: usize, legs: u64) -> usize {
    let most = limit.map_or(u64::MAX, |limit| limit.saturating_sub(RESERVE) / (1 + legs));
    wanted.min(usize::try_from(most.max(1)).unwrap_or(usize::MAX))
}

/// True if a connection failed for lack of something on this machine: descriptors, ports, memory.
pub fn is_exhausted(err: &io::Error) -> bool {
    let lacks = [
        Errno::MFILE,
        Errno::NFILE,
        Errno::ADDRNOTAVAIL,
        Errno::NOBUFS,
        Errno::NOMEM,
    ];
    Errno::from_io_error(err).is_some_and(|errno| lacks.contains(&errno))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn clients_leave_descriptors_for_workers() {
        let most = |limit, legs| client_connections(limit, 65_536, legs);
        assert_eq!(most(None, 1), 65_536);
        assert_eq!(most(Some(1 << 20), 2), 65_536);
        assert_eq!(most(Some(1024), 1), 480);
        assert_eq!(most(Some(1024), 2), 320);
        assert_eq!(most(Some(10), 1), 1);
    }

    #[test]
    fn lack_of_local_resources_is_distinguished_from_faults_of_the_peer() {
        let is = |errno: Errno| is_exhausted(&errno.into());
        assert!(is(Errno::MFILE) && is(Errno::NFILE) && is(Errno::ADDRNOTAVAIL));
        assert!(!is(Errno::CONNREFUSED) && !is(Errno::HOSTUNREACH) && !is(Errno::TIMEDOUT));
        assert!(!is_exhausted(&io::Error::other("no number")));
    }
}
