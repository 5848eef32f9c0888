//! Radix tree of routing texts: which worker was sent which prefixes, so probably still has them in its radix cache.
//!
//! The life of a text:
//!
//! 1. A worker was sent the text: it becomes holder of the whole path from the root ([`PrefixTree::insert`]), splitting a
//!    node where texts part. If it holds the text already, only the stamps move, under the read lock ([`PrefixTree::touch`]).
//! 2. A request looks for the longest prefix held by a candidate ([`PrefixTree::longest_match`]). That changes nothing.
//! 3. A worker above `max_chars` forgets characters: least recently sent first, from the end of a text towards its start.
//!    This happens at each insert, so memory is bounded at every moment, not from pass to pass.
//! 4. A worker is gone: it forgets everything ([`PrefixTree::retire`]). A node without holders is freed, and a node whose
//!    only child has the same holders and stamps is joined with it, so inner nodes do not pile up.
//!
//! ```text
//!   root ─ "You are a helpful assistant. " {1,2,3} ─┬─ "Translate …" {1}
//!                                                   └─ "Summa" {2,3} ─┬─ "rise …" {2}
//!                                                                     └─ "ry of …" {3}
//! ```
//!
//! Unlike SGLang's tree, a node keeps *all* its holders instead of the last one seen: the caller can take the least
//! loaded of them.
//!
//! Invariants (checked by the model test after every step):
//!
//! * holders(child) ⊆ holders(parent), and a holder's stamp never grows towards the leaves;
//! * for each worker the nodes it holds form a tree, whose leaves are exactly its `leaves` queue;
//! * `chars` of a worker = sum of `chars` over its nodes ≤ `max_chars` after each call;
//! * texts are cut between characters only; no node but the root is without text or without holders.
//!
//! Nothing recurses, so the depth of the tree is no concern; children are found by first character, not by scanning.
//! Time is a logical counter. Cost: insert and match O(bytes of text + nodes on the path × log), eviction O(log) a node.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::policy::{PolicyStats, TenantStats};
use crate::types::{WorkerId, WorkerView};

/// Index into the arena. 32 bits: 2^32 nodes would need half a terabyte.
type NodeId = u32;

const ROOT: NodeId = 0;
/// A `queued` value no stamp has.
const NOT_QUEUED: u64 = 0;

#[derive(Debug, Default)]
struct Node {
    /// The characters between the parent and here. Empty for the root and for free slots only.
    text: Box<str>,
    /// Characters (not bytes) in `text`.
    chars: usize,
    parent: NodeId,
    /// By first character of their text.
    children: BTreeMap<char, NodeId>,
    /// Sorted by worker. The root lists nobody.
    holders: Vec<Holder>,
}

/// A worker that was sent every text up to the end of a node.
#[derive(Debug)]
struct Holder {
    worker: WorkerId,
    /// When it last was sent a text that passes through the whole node.
    stamp: AtomicU64,
    /// Under which key the node waits in the worker's `leaves`; [`NOT_QUEUED`] unless `below` is 0. It may be older than
    /// `stamp` (which moves under the read lock); eviction notices and queues the node again.
    queued: u64,
    /// Children of the node that the worker holds too.
    below: u32,
}

impl Holder {
    fn stamp(&self) -> u64 {
        self.stamp.load(Ordering::Relaxed)
    }
}

#[derive(Debug, Default)]
struct Tenant {
    chars: usize,
    /// The ends of its texts, oldest first. Keys are distinct: the nodes with one stamp lie on one path from the root,
    /// and only the lowest of them can be an end.
    leaves: BTreeMap<u64, NodeId>,
    is_leaving: bool,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixTree {
    /// Arena; slots in `free` are reused.
    nodes: Vec<Node>,
    free: Vec<NodeId>,
    tenants: BTreeMap<WorkerId, Tenant>,
    max_chars: usize,
    /// The last stamp given out.
    stamp: AtomicU64,
    text_bytes: usize,
    holders: usize,
    evicted_chars_total: u64,
}

/// The longest prefix some candidate holds.
#[derive(Debug, Clone, Copy)]
pub struct PrefixMatch<'t> {
    pub chars: usize,
    holders: &'t [Holder],
}

impl PrefixMatch<'_> {
    /// Whether `worker` holds the whole match.
    pub fn is_held_by(&self, worker: WorkerId) -> bool {
        position(self.holders, worker).is_ok()
    }
}

impl PrefixTree {
    /// An empty tree in which each worker keeps at most `max_chars` characters.
    pub fn new(max_chars: usize) -> Self {
        Self {
            nodes: vec![Node::default()],
            free: Vec::new(),
            tenants: BTreeMap::new(),
            max_chars,
            stamp: AtomicU64::new(0),
            text_bytes: 0,
            holders: 0,
            evicted_chars_total: 0,
        }
    }

    /// From now on `worker` may hold texts.
    pub fn add(&mut self, worker: WorkerId) {
        self.tenants.entry(worker).or_default();
    }

    /// Forget at most `max_nodes` nodes of a worker that is gone; returns whether there is more to forget. From the first
    /// call on its inserts are ignored. Called in a loop so that the lock is free in between.
    pub fn retire(&mut self, worker: WorkerId, max_nodes: usize) -> bool {
        let Some(tenant) = self.tenants.get_mut(&worker) else {
            return false;
        };
        tenant.is_leaving = true;
        for _ in 0..max_nodes {
            let Some((_, leaf)) = self.oldest_leaf(worker) else {
                break;
            };
            self.release(leaf, worker);
        }
        if self.oldest_leaf(worker).is_some() {
            return true;
        }
        self.tenants.remove(&worker);
        false
    }

    /// Characters `worker` holds; 0 for a stranger.
    pub fn chars_of(&self, worker: WorkerId) -> usize {
        self.tenants.get(&worker).map_or(0, |tenant| tenant.chars)
    }

    /// The longest prefix of `text` that at least one of `ready` holds.
    pub fn longest_match(&self, text: &str, ready: &[WorkerView]) -> PrefixMatch<'_> {
        let mut path: Vec<PrefixMatch<'_>> = Vec::new();
        let (mut at, mut rest, mut chars) = (self.node(ROOT), text, 0);
        while let Some(child) = at.child_for(rest) {
            let node = self.node(child);
            let common = common_prefix_bytes(&node.text, rest);
            let is_whole = common == node.text.len();
            chars += if is_whole {
                node.chars
            } else {
                rest[..common].chars().count()
            };
            path.push(PrefixMatch {
                chars,
                holders: &node.holders,
            });
            if !is_whole {
                break;
            }
            (at, rest) = (node, &rest[common..]);
        }
        // Holders only get fewer along the path.
        let held =
            path.partition_point(|step| ready.iter().any(|worker| step.is_held_by(worker.id)));
        path.truncate(held);
        path.pop().unwrap_or(PrefixMatch {
            chars: 0,
            holders: &[],
        })
    }

    /// If `worker` holds exactly this text as the end of a node, renew it and return true; else an insert is needed.
    pub fn touch(&self, worker: WorkerId, text: &str) -> bool {
        let (mut id, mut rest) = (ROOT, text);
        while !rest.is_empty() {
            let Some(child) = self.node(id).child_for(rest) else {
                return false;
            };
            let Some(behind) = rest.strip_prefix(&*self.node(child).text) else {
                return false;
            };
            (id, rest) = (child, behind);
        }
        if id != ROOT && position(&self.node(id).holders, worker).is_err() {
            return false;
        }
        let stamp = self.next_stamp();
        while id != ROOT {
            let node = self.node(id);
            if let Ok(at) = position(&node.holders, worker) {
                node.holders[at].stamp.fetch_max(stamp, Ordering::Relaxed);
            }
            id = node.parent;
        }
        true
    }

    /// `worker` was sent `text`. Ignored for a worker that was not added or is leaving. Afterwards the worker is within
    /// `max_chars`; a text longer than that is kept up to there.
    pub fn insert(&mut self, worker: WorkerId, text: &str) {
        if self
            .tenants
            .get(&worker)
            .is_none_or(|tenant| tenant.is_leaving)
        {
            return;
        }
        let stamp = self.next_stamp();
        let (mut at, mut rest) = (ROOT, text);
        while !rest.is_empty() {
            let child = match self.node(at).child_for(rest) {
                None => self.add_child(at, rest),
                Some(child) => {
                    let common = common_prefix_bytes(&self.node(child).text, rest);
                    if common < self.node(child).text.len() {
                        self.split(child, common)
                    } else {
                        child
                    }
                }
            };
            self.hold(child, worker, stamp);
            rest = &rest[self.node(child).text.len()..];
            at = child;
        }
        if at != ROOT && self.holder_mut(at, worker).below == 0 {
            self.queue(at, worker);
        }
        self.shrink(worker);
    }

    /// Bring every worker under `max_chars`; returns the characters dropped. Inserts do so already, hence 0 unless an
    /// insert was cut short.
    pub fn evict(&mut self) -> usize {
        let workers: Vec<WorkerId> = self.tenants.keys().copied().collect();
        workers.into_iter().map(|worker| self.shrink(worker)).sum()
    }

    /// Sizes, for metrics.
    pub fn stats(&self) -> PolicyStats {
        /// A link in `children` and one in `leaves`, both in B-trees that are about 2/3 full.
        const LINK_BYTES: usize = 40;
        let nodes = self.nodes.len() - self.free.len() - 1;
        PolicyStats {
            tenants: self
                .tenants
                .iter()
                .map(|(&worker, tenant)| TenantStats {
                    worker,
                    chars: tenant.chars,
                })
                .collect(),
            nodes,
            text_bytes: self.text_bytes,
            tree_bytes: self.text_bytes
                + self.nodes.capacity() * size_of::<Node>()
                + self.holders * size_of::<Holder>()
                + nodes * LINK_BYTES,
            evicted_chars_total: self.evicted_chars_total,
        }
    }

    // --- forgetting

    /// Drop what `worker` holds above `max_chars`, oldest first; returns the characters dropped.
    fn shrink(&mut self, worker: WorkerId) -> usize {
        let mut dropped = 0;
        loop {
            let excess = self.chars_of(worker).saturating_sub(self.max_chars);
            if excess == 0 {
                break;
            }
            let Some((key, leaf)) = self.oldest_leaf(worker) else {
                break;
            };
            if self.holder_mut(leaf, worker).stamp() != key {
                self.queue(leaf, worker); // touched since it was queued
                continue;
            }
            let chars = self.node(leaf).chars;
            if excess < chars {
                let kept = byte_of_char(&self.node(leaf).text, chars - excess);
                self.split(leaf, kept); // `leaf` is now the end only
            }
            dropped += self.node(leaf).chars;
            self.release(leaf, worker);
        }
        self.evicted_chars_total += dropped as u64;
        dropped
    }

    fn oldest_leaf(&self, worker: WorkerId) -> Option<(u64, NodeId)> {
        self.tenants
            .get(&worker)?
            .leaves
            .first_key_value()
            .map(|(&key, &leaf)| (key, leaf))
    }

    /// `worker` forgets `leaf`, one of its leaves. The parent may become its leaf; nodes are freed and joined as due.
    fn release(&mut self, leaf: NodeId, worker: WorkerId) {
        let node = &mut self.nodes[leaf as usize];
        let (parent, chars) = (node.parent, node.chars);
        if let Ok(at) = position(&node.holders, worker) {
            let holder = node.holders.remove(at);
            debug_assert_eq!(holder.below, 0, "only ends of texts are forgotten");
            self.holders -= 1;
            let tenant = self.tenant_mut(worker);
            tenant.leaves.remove(&holder.queued);
            tenant.chars -= chars;
        }
        if parent != ROOT {
            let holder = self.holder_mut(parent, worker);
            holder.below -= 1;
            if holder.below == 0 {
                self.queue(parent, worker);
            }
        }
        if self.node(leaf).holders.is_empty() {
            self.unlink(leaf);
            self.join_with_only_child(parent);
        } else {
            self.join_with_only_child(leaf);
        }
    }

    /// Free a node without holders; it has no children then.
    fn unlink(&mut self, id: NodeId) {
        let node = std::mem::take(&mut self.nodes[id as usize]);
        debug_assert!(
            node.children.is_empty(),
            "a child's holders hold its parent"
        );
        self.text_bytes -= node.text.len();
        if let Some(first) = node.text.chars().next() {
            self.nodes[node.parent as usize].children.remove(&first);
        }
        self.free.push(id);
    }

    /// Undo a split that no longer tells anything apart. The child's slot stays, because it may be queued as a leaf; `id`
    /// cannot be, as its holders all go on to the child.
    fn join_with_only_child(&mut self, id: NodeId) {
        let node = self.node(id);
        let Some((_, &child)) = node.children.first_key_value() else {
            return;
        };
        let is_same = |(a, b): (&Holder, &Holder)| a.worker == b.worker && a.stamp() == b.stamp();
        let below = &self.node(child).holders;
        if id == ROOT
            || node.children.len() > 1
            || node.holders.len() != below.len()
            || !node.holders.iter().zip(below).all(is_same)
        {
            return;
        }
        let upper = std::mem::take(&mut self.nodes[id as usize]);
        self.free.push(id);
        self.holders -= upper.holders.len();
        let lower = &mut self.nodes[child as usize];
        lower.text = [&*upper.text, &*lower.text].concat().into_boxed_str();
        lower.chars += upper.chars;
        lower.parent = upper.parent;
        self.link(upper.parent, child);
    }

    // --- growing

    /// A new node under `parent`, held by nobody yet.
    fn add_child(&mut self, parent: NodeId, text: &str) -> NodeId {
        self.text_bytes += text.len();
        let node = Node {
            text: text.into(),
            chars: text.chars().count(),
            parent,
            ..Node::default()
        };
        let id = self.place(node);
        self.link(parent, id);
        id
    }

    /// Cut a node in two before byte `at`. Returns the new upper half; `id` stays the lower one, so that queued leaves and
    /// children keep their place.
    fn split(&mut self, id: NodeId, at: usize) -> NodeId {
        let lower = &mut self.nodes[id as usize];
        let (head, tail) = lower.text.split_at(at);
        let (head, tail): (Box<str>, Box<str>) = (head.into(), tail.into());
        let head_chars = head.chars().count();
        let above = |holder: &Holder| Holder {
            worker: holder.worker,
            stamp: AtomicU64::new(holder.stamp()),
            queued: NOT_QUEUED,
            below: 1,
        };
        let upper = Node {
            text: head,
            chars: head_chars,
            parent: lower.parent,
            children: BTreeMap::new(),
            holders: lower.holders.iter().map(above).collect(),
        };
        lower.text = tail;
        lower.chars -= head_chars;
        self.holders += upper.holders.len();
        let parent = upper.parent;
        let upper = self.place(upper);
        self.nodes[id as usize].parent = upper;
        self.link(parent, upper);
        self.link(upper, id);
        upper
    }

    /// `worker` holds the node, as of `stamp`. It holds the parent already.
    fn hold(&mut self, id: NodeId, worker: WorkerId, stamp: u64) {
        let node = &mut self.nodes[id as usize];
        let (parent, chars) = (node.parent, node.chars);
        match position(&node.holders, worker) {
            Ok(at) => *node.holders[at].stamp.get_mut() = stamp,
            Err(at) => {
                if node.holders.is_empty() {
                    node.holders.reserve_exact(1); // most nodes have one holder
                }
                let holder = Holder {
                    worker,
                    stamp: AtomicU64::new(stamp),
                    queued: NOT_QUEUED,
                    below: 0,
                };
                node.holders.insert(at, holder);
                self.holders += 1;
                self.tenant_mut(worker).chars += chars;
                if parent != ROOT {
                    self.dequeue(parent, worker);
                    self.holder_mut(parent, worker).below += 1;
                }
            }
        }
    }

    /// Put a leaf of `worker` at the place its stamp gives it.
    fn queue(&mut self, leaf: NodeId, worker: WorkerId) {
        self.dequeue(leaf, worker);
        let holder = self.holder_mut(leaf, worker);
        let stamp = holder.stamp();
        holder.queued = stamp;
        let before = self.tenant_mut(worker).leaves.insert(stamp, leaf);
        debug_assert!(
            before.is_none(),
            "two ends of one worker with stamp {stamp}"
        );
    }

    fn dequeue(&mut self, leaf: NodeId, worker: WorkerId) {
        let queued = std::mem::replace(&mut self.holder_mut(leaf, worker).queued, NOT_QUEUED);
        if queued != NOT_QUEUED {
            self.tenant_mut(worker).leaves.remove(&queued);
        }
    }

    // --- access

    fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn place(&mut self, node: Node) -> NodeId {
        if let Some(id) = self.free.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as NodeId
    }

    fn link(&mut self, parent: NodeId, child: NodeId) {
        if let Some(first) = self.node(child).text.chars().next() {
            self.nodes[parent as usize].children.insert(first, child);
        }
    }

    fn node(&self, id: NodeId) -> &Node {
        &self.nodes[id as usize]
    }

    fn holder_mut(&mut self, id: NodeId, worker: WorkerId) -> &mut Holder {
        let holders = &mut self.nodes[id as usize].holders;
        let at = position(holders, worker).expect("callers name a node the worker holds");
        &mut holders[at]
    }

    fn tenant_mut(&mut self, worker: WorkerId) -> &mut Tenant {
        self.tenants
            .get_mut(&worker)
            .expect("holders are tenants until the last node is released")
    }
}

impl Node {
    fn child_for(&self, rest: &str) -> Option<NodeId> {
        self.children.get(&rest.chars().next()?).copied()
    }
}

fn position(holders: &[Holder], worker: WorkerId) -> Result<usize, usize> {
    holders.binary_search_by_key(&worker, |holder| holder.worker)
}

/// Bytes of the longest common prefix, whole characters only.
fn common_prefix_bytes(a: &str, b: &str) -> usize {
    const BLOCK: usize = 128; // compared at once; the rest byte by byte
    let (a_bytes, b_bytes) = (a.as_bytes(), b.as_bytes());
    let blocks = a_bytes.chunks_exact(BLOCK).zip(b_bytes.chunks_exact(BLOCK));
    let mut common = BLOCK * blocks.take_while(|(x, y)| x == y).count();
    let tails = a_bytes[common..].iter().zip(&b_bytes[common..]);
    common += tails.take_while(|(x, y)| x == y).count();
    // The bytes before are equal, so a boundary in one is a boundary in the other.
    while !a.is_char_boundary(common) {
        common -= 1;
    }
    common
}

/// Where character number `at` begins; the length if there are no more.
fn byte_of_char(text: &str, at: usize) -> usize {
    text.char_indices()
        .nth(at)
        .map_or(text.len(), |(byte, _)| byte)
}

#[cfg(test)]
mod model_test;
