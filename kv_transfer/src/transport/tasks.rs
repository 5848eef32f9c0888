//! Tasks that serve peers, bounded per peer and in all. The oldest one is aborted to make space for
//! the newest, so that silent peers do not block others.

use std::collections::VecDeque;
use std::io;
use std::net::{IpAddr, TcpListener};
use std::time::Duration;

use tokio::net::TcpStream;
use tokio::task::{AbortHandle, Id, JoinSet};

const RETRY_PAUSE: Duration = Duration::from_millis(50);

/// Accept connections and serve each of them in a task. `evicted` is called for each one that was
/// closed to make space for another of its address or of any. Runs until the listener cannot be
/// used at all.
pub async fn accept_all<T: Future<Output = ()> + Send + 'static>(
    listener: TcpListener,
    mut tasks: PeerTasks<IpAddr>,
    serve: impl Fn(TcpStream) -> T,
    evicted: impl Fn(),
) -> io::Error {
    let listener = match tokio::net::TcpListener::from_std(listener) {
        Ok(listener) => listener,
        Err(err) => return err,
    };
    let mut running = JoinSet::new();
    loop {
        tokio::select! {
            accepted = listener.accept() => match accepted {
                Ok((stream, from)) => {
                    let task = running.spawn(serve(stream));
                    if tasks.add(from.ip().to_canonical(), task) {
                        evicted();
                    }
                }
                Err(err) => {
                    // Out of descriptors, or the peer closed at once: continue to serve the others.
                    tracing::warn!(%err, "accept failed");
                    tokio::time::sleep(RETRY_PAUSE).await;
                }
            },
            Some(ended) = running.join_next_with_id() => {
                tasks.remove_ended(ended.map_or_else(|err| err.id(), |(id, ())| id));
            }
        }
    }
}

/// Running tasks with the peer each of them serves, oldest first.
pub struct PeerTasks<K> {
    per_peer: usize,
    limit: usize,
    tasks: VecDeque<(K, AbortHandle)>,
}

impl<K: PartialEq> PeerTasks<K> {
    pub fn new(per_peer: usize, limit: usize) -> Self {
        Self {
            per_peer,
            limit,
            tasks: VecDeque::new(),
        }
    }

    /// Adds a task. Returns whether another one was aborted for it: the peer's oldest, or the
    /// oldest of all.
    pub fn add(&mut self, peer: K, task: AbortHandle) -> bool {
        let mut same_peer = (0..self.tasks.len()).filter(|&i| self.tasks[i].0 == peer);
        let oldest = same_peer.next();
        let is_peer_full = oldest.is_some() && 1 + same_peer.count() >= self.per_peer;
        let aborted = match oldest {
            Some(oldest) if is_peer_full => self.tasks.remove(oldest),
            _ if self.tasks.len() >= self.limit => self.tasks.pop_front(),
            _ => None,
        };
        if let Some((_, task)) = &aborted {
            task.abort();
        }
        self.tasks.push_back((peer, task));
        aborted.is_some()
    }

    /// Forgets a task that has ended.
    pub fn remove_ended(&mut self, id: Id) {
        self.tasks.retain(|(_, task)| task.id() != id);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn oldest_task_of_a_full_peer_or_of_a_full_table_is_aborted() {
        let mut running = JoinSet::new();
        let mut tasks = PeerTasks::new(2, 3);
        let mut add = |peer: &'static str| {
            let task = running.spawn(std::future::pending::<()>());
            let id = task.id();
            (tasks.add(peer, task), id)
        };
        let (_, first) = add("a");
        let (_, second) = add("a");
        let (aborted, _) = add("b");
        assert!(!aborted);
        assert!(add("a").0, "a has two already");
        assert!(add("c").0, "three run already");
        let mut ended = Vec::new();
        for _ in 0..2 {
            let end = running.join_next_with_id().await.expect("some run");
            ended.push(end.expect_err("aborted").id());
        }
        ended.sort_by_key(|id| [first, second].iter().position(|known| known == id));
        assert_eq!(ended, [first, second]);
        let left: Vec<_> = tasks.tasks.iter().map(|(peer, _)| *peer).collect();
        assert_eq!(left, ["b", "a", "c"]);
        let id = tasks.tasks[0].1.id();
        tasks.remove_ended(id);
        assert!(!tasks.add("d", running.spawn(async {})));
    }
}
