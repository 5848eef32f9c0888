//! Radix tree of prompts: which worker was sent which prefixes, so probably still has them in its
//! radix cache.
//!
//! The life of a path, which is a text or a chain of block hashes ([`TreeSegment`]):
//!
//! 1. A worker was sent it: it becomes holder of the whole path from the root
//!    ([`PrefixTree::insert`]), splitting a node where paths part. If it holds the path already,
//!    only the stamps move, under a read lock ([`PrefixTree::touch_path`]).
//! 2. A request looks for the longest prefix held by a candidate ([`PrefixTree::longest_match`]),
//!    or for the prefix of each candidate ([`PrefixTree::held_by`]). That changes nothing.
//! 3. A worker above its limit of units forgets: least recently sent first, from the end of a path
//!    towards its start. A tree above `max_bytes` does so for the worker that was sent something
//!    longest ago. This happens at each insert, so memory is bounded at every moment, not from pass
//!    to pass.
//! 4. The request failed: claims that it alone made are taken back ([`PrefixTree::retract`]).
//! 5. A worker is gone: it forgets everything ([`PrefixTree::retire_worker`]). A node without
//!    holders is freed, and a node is joined with its only child if both have the same holders and
//!    stamps, so inner nodes do not pile up.
//!
//! ```text
//!   root ─ "You are a helpful assistant. " {1,2,3} ─┬─ "Translate …" {1}
//!                                                   └─ "Summa" {2,3} ─┬─ "rise …" {2}
//!                                                                     └─ "ry of …" {3}
//! ```
//!
//! Unlike SGLang's tree, a node keeps *all* its holders instead of the last one seen: the caller
//! can take the least loaded of them.
//!
//! Invariants (checked by the model test after every step):
//!
//! * holders(child) ⊆ holders(parent), and a holder's stamp never grows towards the leaves;
//! * the nodes of a worker form a tree, and its `leaves` queue has exactly the leaves of it;
//! * `units` of a worker = sum of `units` over its nodes ≤ its limit after each call, and `bytes()`
//!   ≤ `max_bytes`;
//! * no node but the root is without a label or without holders.
//!
//! Nothing recurses, so the depth of the tree is no concern; children are found by their first
//! unit, not by scanning. Time is a logical counter. Cost: insert and match O(length of the path +
//! nodes on it × log), eviction O(log) a node.

mod holder;
mod segment;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::types::{WorkerId, WorkerView};

use holder::{Holder, NOT_QUEUED, find_holder};
pub use segment::TreeSegment;

/// Index into the arena. 32 bits: 2^32 nodes would need half a terabyte.
type NodeId = u32;

const ROOT: NodeId = 0;

#[derive(Debug)]
struct Node<S: TreeSegment + ?Sized> {
    /// Segment between the parent and here. Empty for the root and for free slots only.
    label: Box<S>,
    /// Units in `label`.
    units: usize,
    parent: NodeId,
    /// By the first unit of their label.
    children: BTreeMap<S::First, NodeId>,
    /// Sorted by worker. The root lists none.
    holders: Vec<Holder>,
}

#[derive(Debug, Default)]
struct Tenant {
    units: usize,
    /// Most units it may hold.
    limit: usize,
    /// The ends of its paths, oldest first. Keys are distinct: the nodes with one stamp lie on one
    /// path from the root, and only the lowest of them can be an end.
    leaves: BTreeMap<u64, NodeId>,
    is_leaving: bool,
}

/// See the module.
#[derive(Debug)]
pub struct PrefixTree<S: TreeSegment + ?Sized> {
    /// Arena; slots in `free` are reused.
    nodes: Vec<Node<S>>,
    free: Vec<NodeId>,
    tenants: BTreeMap<WorkerId, Tenant>,
    max_bytes: usize,
    /// The last stamp given out.
    stamp: AtomicU64,
    label_bytes: usize,
    /// Allocated places for holders, in use or not.
    holder_slots: usize,
    /// Nodes with children.
    inner: usize,
    evicted_units_total: u64,
}

/// Names one insert; later ones are larger.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct AccessStamp(u64);

/// The longest prefix some candidate holds.
#[derive(Debug, Clone, Copy)]
pub struct PrefixMatch<'t> {
    pub units: usize,
    holders: &'t [Holder],
}

impl PrefixMatch<'_> {
    /// True if `worker` holds the whole match.
    pub fn is_held_by(&self, worker: WorkerId) -> bool {
        find_holder(self.holders, worker).is_ok()
    }
}

impl<S: TreeSegment + ?Sized> PrefixTree<S>
where
    Box<S>: Default + for<'a> From<&'a S>,
{
    /// An empty tree of at most `max_bytes` bytes.
    pub fn new(max_bytes: usize) -> Self {
        Self {
            nodes: vec![Node::new(Box::default(), ROOT)],
            free: Vec::new(),
            tenants: BTreeMap::new(),
            max_bytes,
            stamp: AtomicU64::new(0),
            label_bytes: 0,
            holder_slots: 0,
            inner: 0,
            evicted_units_total: 0,
        }
    }

    /// From now on `worker` may hold up to `limit` units. One that does already gets the new limit
    /// at its next insert.
    pub fn add_worker(&mut self, worker: WorkerId, limit: usize) {
        self.tenants.entry(worker).or_default().limit = limit;
    }

    /// Forget at most `max_nodes` nodes of a worker that is gone; returns whether there is more to
    /// forget. From the first call on its inserts are ignored. Called in a loop so that the lock is
    /// free in between.
    pub fn retire_worker(&mut self, worker: WorkerId, max_nodes: usize) -> bool {
        let Some(tenant) = self.tenants.get_mut(&worker) else {
            return false;
        };
        tenant.is_leaving = true;
        for _ in 0..max_nodes {
            let Some((_, leaf)) = self.oldest_leaf(worker) else {
                break;
            };
            self.release_leaf(leaf, worker);
        }
        if self.oldest_leaf(worker).is_some() {
            return true;
        }
        self.tenants.remove(&worker);
        false
    }

    /// Units `worker` holds; 0 for a stranger.
    pub fn units_of(&self, worker: WorkerId) -> usize {
        self.tenants.get(&worker).map_or(0, |tenant| tenant.units)
    }

    /// The nodes along `path`, each with the units matched up to its end, or to where the path
    /// leaves it.
    fn walk_matches<'t>(&'t self, path: &'t S) -> impl Iterator<Item = PrefixMatch<'t>> {
        let mut next = self.node(ROOT).child_for(path);
        let mut suffix = path;
        let mut units = 0;
        std::iter::from_fn(move || {
            let node = self.node(next?);
            let common = node.label.common_length(suffix);
            let (matched, behind) = suffix.split_at(common);
            // Inside a label no child can follow: its part is the end of the match.
            if common == node.label.len() {
                units += node.units;
                next = node.child_for(behind);
                suffix = behind;
            } else {
                units += matched.units();
                next = None;
            }
            let holders = &node.holders;
            Some(PrefixMatch { units, holders })
        })
    }

    /// The longest prefix of `path` that at least one of `ready` holds.
    pub fn longest_match<'t>(&'t self, path: &'t S, ready: &[WorkerView]) -> PrefixMatch<'t> {
        let mut path: Vec<PrefixMatch<'_>> = self.walk_matches(path).collect();
        // holders(child) ⊆ holders(parent), so that a binary search finds the last step held.
        let held_steps =
            path.partition_point(|step| ready.iter().any(|worker| step.is_held_by(worker.id)));
        path.truncate(held_steps);
        path.pop().unwrap_or(PrefixMatch {
            units: 0,
            holders: &[],
        })
    }

    /// How many units of `path` each of `workers` holds, into `held`; `workers` are sorted. Returns
    /// how many any of them holds, candidate or not. Allocates nothing.
    pub fn held_by(&self, path: &S, workers: &[WorkerId], held: &mut [usize]) -> usize {
        debug_assert!(workers.is_sorted() && workers.len() == held.len());
        held.fill(0);
        let mut deepest = 0;
        let mut note = |step: PrefixMatch<'_>| {
            let mut next_worker = 0;
            for holder in step.holders {
                next_worker +=
                    workers[next_worker..].partition_point(|worker| *worker < holder.worker);
                match workers.get(next_worker) {
                    Some(worker) if *worker == holder.worker => held[next_worker] = step.units,
                    Some(_) => {}
                    None => break,
                }
            }
        };
        let mut last: Option<PrefixMatch<'_>> = None;
        for step in self.walk_matches(path) {
            deepest = step.units;
            // Holders only get fewer along the path. Equally many are the same workers, so that
            // only the last such step is noted: a long path under one holder costs one pass.
            match last.replace(step) {
                Some(before) if before.holders.len() != step.holders.len() => note(before),
                _ => {}
            }
        }
        if let Some(step) = last {
            note(step);
        }
        deepest
    }

    /// If `worker` holds exactly this path as the end of a node, renew it and return true; else an
    /// insert is needed.
    pub fn touch_path(&self, worker: WorkerId, path: &S) -> bool {
        let mut id = ROOT;
        let mut suffix = path;
        while !suffix.is_empty() {
            let Some(next) = self.descend_to_child(id, suffix) else {
                return false;
            };
            (id, suffix) = next;
        }
        if id != ROOT && find_holder(&self.node(id).holders, worker).is_err() {
            return false;
        }
        let stamp = self.next_stamp();
        while id != ROOT {
            let node = self.node(id);
            if let Ok(index) = find_holder(&node.holders, worker) {
                node.holders[index]
                    .stamp
                    .fetch_max(stamp, Ordering::Relaxed);
            }
            id = node.parent;
        }
        true
    }

    /// `worker` was sent `path`. Ignored for a worker that was not added or is leaving. Afterwards
    /// the worker and the tree are within their limits; a path longer than that is kept up to
    /// there. Returns the stamp, for [`Self::retract`].
    pub fn insert(&mut self, worker: WorkerId, path: &S) -> AccessStamp {
        let stamp = self.next_stamp();
        let tenant = self.tenants.get(&worker);
        // A worker that is gone would hold these nodes for ever: no later call retires it again.
        if tenant.is_none_or(|tenant| tenant.is_leaving) {
            return AccessStamp(stamp);
        }
        self.make_room();
        let mut parent = ROOT;
        let mut suffix = path;
        while !suffix.is_empty() {
            let child = match self.node(parent).child_for(suffix) {
                None => self.add_child(parent, suffix),
                Some(child) => {
                    let label = &self.node(child).label;
                    let common = label.common_length(suffix);
                    let len = label.len();
                    // The paths part inside this label: the worker holds the upper half alone.
                    if common < len {
                        self.split_node(child, common)
                    } else {
                        child
                    }
                }
            };
            self.add_holder(child, worker, stamp);
            suffix = suffix.split_at(self.node(child).label.len()).1;
            parent = child;
        }
        // Only ends of paths are evicted: a node with children held by the worker is queued when
        // they go.
        if parent != ROOT && self.holder_mut(parent, worker).below == 0 {
            self.queue_leaf(parent, worker);
        }
        self.shrink_worker(worker);
        while self.bytes() > self.max_bytes && self.forget_oldest() {}
        AccessStamp(stamp)
    }

    /// Take back what the insert that returned `stamp` claimed beyond the first `keep` units,
    /// unless something sent since passes through it.
    pub fn retract(&mut self, worker: WorkerId, path: &S, stamp: AccessStamp, keep: usize) {
        let mut id = ROOT;
        let mut suffix = path;
        let mut units = 0;
        while let Some((child, behind)) = self.descend_to_child(id, suffix)
            && find_holder(&self.node(child).holders, worker).is_ok()
        {
            id = child;
            suffix = behind;
            units += self.node(child).units;
        }
        while id != ROOT && units > keep {
            let node = self.node(id);
            let Ok(index) = find_holder(&node.holders, worker) else {
                break; // merged: its other holders continue from there
            };
            // A later request passed through here or beyond, so that the worker has this part after
            // all.
            if node.holders[index].below > 0 || node.holders[index].stamp() != stamp.0 {
                break;
            }
            let parent = node.parent;
            let above = units - node.units;
            // The first `keep` units were the worker's before this insert.
            if above < keep {
                self.split_node(id, node.label.position_of_unit(keep - above));
                self.release_leaf(id, worker);
                break;
            }
            self.release_leaf(id, worker);
            id = parent;
            units = above;
        }
    }

    /// `worker` forgets what it was last sent before the insert `lasting`; `None`: all of it.
    pub fn expire_older(&mut self, worker: WorkerId, lasting: Option<AccessStamp>) {
        let limit = lasting.map_or(u64::MAX, |stamp| stamp.0);
        while let Some((stamp, leaf)) = self.oldest_leaf(worker)
            && stamp < limit
        {
            self.release_leaf(leaf, worker);
        }
    }

    /// From the next insert on the tree is at most so large.
    pub fn limit_bytes(&mut self, max_bytes: usize) {
        self.max_bytes = max_bytes;
    }

    /// Units dropped for a limit since the start.
    pub fn evicted_units_total(&self) -> u64 {
        self.evicted_units_total
    }

    /// Bring every worker under its limit; returns the units dropped. Inserts do so already, hence
    /// 0 unless an insert was cut short or a limit has become smaller.
    pub fn evict(&mut self) -> usize {
        let workers: Vec<WorkerId> = self.tenants.keys().copied().collect();
        workers
            .into_iter()
            .map(|worker| self.shrink_worker(worker))
            .sum()
    }

    /// Units each worker holds, ordered by id; a prefix shared by two workers counts for both.
    pub fn units_by_worker(&self) -> Vec<(WorkerId, usize)> {
        self.tenants
            .iter()
            .map(|(&worker, tenant)| (worker, tenant.units))
            .collect()
    }

    /// Estimated memory: labels, arena, holders, and links between nodes.
    pub fn bytes(&self) -> usize {
        /// Memory of a link in `children` and one in `leaves`, both in B-trees that are about 2/3
        /// full.
        const LINK_BYTES: usize = 48;
        /// The first leaf of a B-tree of children.
        const INNER_BYTES: usize = 160;
        self.label_bytes
            + self.nodes.capacity() * size_of::<Node<S>>()
            + self.free.capacity() * size_of::<NodeId>()
            + self.holder_slots * size_of::<Holder>()
            + (self.nodes.len() - self.free.len()) * LINK_BYTES
            + self.inner * INNER_BYTES
    }

    // --- forgetting

    /// Drop what `worker` holds above its limit, oldest first; returns the units dropped.
    fn shrink_worker(&mut self, worker: WorkerId) -> usize {
        let mut dropped = 0;
        loop {
            let limit = self.tenants.get(&worker).map_or(0, |tenant| tenant.limit);
            let excess = self.units_of(worker).saturating_sub(limit);
            if excess == 0 {
                break;
            }
            let Some((_, leaf)) = self.oldest_leaf(worker) else {
                break;
            };
            let units = self.node(leaf).units;
            // A long label is cut, so that the worker keeps as much as its limit allows.
            if excess < units {
                let cut = self.node(leaf).label.position_of_unit(units - excess);
                self.split_node(leaf, cut); // `leaf` is now the end only
            }
            dropped += self.node(leaf).units;
            self.release_leaf(leaf, worker);
        }
        self.evicted_units_total += dropped as u64;
        dropped
    }

    /// The end of a path that was sent longest ago, by any holder, is forgotten; false when no
    /// worker holds anything.
    fn forget_oldest(&mut self) -> bool {
        let leaves = |(&worker, tenant): (&WorkerId, &Tenant)| {
            let (&key, &leaf) = tenant.leaves.first_key_value()?;
            Some((key, leaf, worker))
        };
        let Some((key, leaf, worker)) = self.tenants.iter().filter_map(leaves).min() else {
            return false;
        };
        if self.holder_mut(leaf, worker).stamp() != key {
            // Touched since it was queued, under the read lock, which cannot move it in the queue.
            self.queue_leaf(leaf, worker);
        } else {
            self.evicted_units_total += self.node(leaf).units as u64;
            self.release_leaf(leaf, worker);
        }
        true
    }

    /// An insert adds up to three nodes (a split, a child, a cut end). If the arena may not grow
    /// for them, forget.
    fn make_room(&mut self) {
        const NEW_NODES: usize = 3;
        let step = self.arena_step();
        while self.free.len() < NEW_NODES
            && self.nodes.len() + NEW_NODES > self.nodes.capacity()
            && self.bytes() + step * size_of::<Node<S>>() > self.max_bytes
            && self.forget_oldest()
        {}
    }

    /// Slots that the arena grows by: an eighth, so that little memory is allocated without use.
    fn arena_step(&self) -> usize {
        (self.nodes.len() / 8).max(16)
    }

    /// The end of a path that `worker` was sent longest ago, and its stamp.
    fn oldest_leaf(&mut self, worker: WorkerId) -> Option<(u64, NodeId)> {
        loop {
            let (&key, &leaf) = self.tenants.get(&worker)?.leaves.first_key_value()?;
            if self.holder_mut(leaf, worker).stamp() == key {
                return Some((key, leaf));
            }
            // Touched since it was queued, under the read lock, which cannot move it in the queue.
            self.queue_leaf(leaf, worker);
        }
    }

    /// `worker` forgets `leaf`, one of its leaves. The parent may become its leaf; nodes are freed
    /// and joined as due.
    fn release_leaf(&mut self, leaf: NodeId, worker: WorkerId) {
        let node = &mut self.nodes[leaf as usize];
        let parent = node.parent;
        let units = node.units;
        if let Ok(index) = find_holder(&node.holders, worker) {
            let holder = node.holders.remove(index);
            debug_assert_eq!(holder.below, 0, "only ends of paths are forgotten");
            let tenant = self.tenant_mut(worker);
            tenant.leaves.remove(&holder.queued);
            tenant.units -= units;
        }
        if parent != ROOT {
            let holder = self.holder_mut(parent, worker);
            holder.below -= 1;
            // The parent is an end now: never queued, it could never be evicted.
            if holder.below == 0 {
                self.queue_leaf(parent, worker);
            }
        }
        // A node that no worker holds matches nothing and would stay for ever.
        if self.node(leaf).holders.is_empty() {
            self.unlink_node(leaf);
            self.join_with_only_child(parent);
        } else {
            self.join_with_only_child(leaf);
        }
    }

    /// Free a node without holders; it has no children then.
    fn unlink_node(&mut self, id: NodeId) {
        let node = self.take_node(id);
        debug_assert!(
            node.children.is_empty(),
            "a child's holders hold its parent"
        );
        self.label_bytes -= size_of_val(&*node.label);
        if let Some(first) = node.label.first_key() {
            let siblings = &mut self.nodes[node.parent as usize].children;
            siblings.remove(&first);
            self.inner -= usize::from(siblings.is_empty());
        }
    }

    /// Empty a slot for reuse.
    fn take_node(&mut self, id: NodeId) -> Node<S> {
        self.free.push(id);
        let empty = Node::new(Box::default(), ROOT);
        let node = std::mem::replace(&mut self.nodes[id as usize], empty);
        self.holder_slots -= node.holders.capacity();
        node
    }

    /// Undo a split that no longer tells anything apart. The child's slot stays, because it may be
    /// queued as a leaf; `id` cannot be, as its holders all go on to the child.
    fn join_with_only_child(&mut self, id: NodeId) {
        let node = self.node(id);
        let Some((_, &child)) = node.children.first_key_value() else {
            return;
        };
        let is_same = |(a, b): (&Holder, &Holder)| a.worker == b.worker && a.stamp() == b.stamp();
        let below = &self.node(child).holders;
        // Nodes with other holders or stamps differ in what they match, or in when they are
        // evicted.
        if id == ROOT
            || node.children.len() > 1
            || node.holders.len() != below.len()
            || !node.holders.iter().zip(below).all(is_same)
        {
            return;
        }
        let upper = self.take_node(id);
        self.inner -= 1;
        let lower = &mut self.nodes[child as usize];
        lower.label = upper.label.join_segments(&lower.label);
        lower.units += upper.units;
        lower.parent = upper.parent;
        self.link_child(upper.parent, child);
    }

    // --- growing

    /// A new node under `parent`, without holders yet.
    fn add_child(&mut self, parent: NodeId, label: &S) -> NodeId {
        self.label_bytes += size_of_val(label);
        let id = self.place_node(Node::new(label.into(), parent));
        self.link_child(parent, id);
        id
    }

    /// Cut a node in two at position `at`. Returns the new upper half; `id` stays the lower one, so
    /// that queued leaves and children keep their place.
    fn split_node(&mut self, id: NodeId, at: usize) -> NodeId {
        let lower = &mut self.nodes[id as usize];
        let (head, tail) = lower.label.split_at(at);
        let head = Box::from(head);
        let tail = Box::from(tail);
        let above = |holder: &Holder| Holder::new(holder.worker, holder.stamp(), 1);
        let mut upper = Node::new(head, lower.parent);
        upper.holders = lower.holders.iter().map(above).collect();
        lower.label = tail;
        lower.units -= upper.units;
        self.holder_slots += upper.holders.capacity();
        let parent = upper.parent;
        let upper = self.place_node(upper);
        self.nodes[id as usize].parent = upper;
        self.link_child(parent, upper);
        self.link_child(upper, id);
        upper
    }

    /// `worker` holds the node, as of `stamp`. It holds the parent already.
    fn add_holder(&mut self, id: NodeId, worker: WorkerId, stamp: u64) {
        let node = &mut self.nodes[id as usize];
        let parent = node.parent;
        let units = node.units;
        match find_holder(&node.holders, worker) {
            Ok(index) => *node.holders[index].stamp.get_mut() = stamp,
            Err(index) => {
                let before = node.holders.capacity();
                if node.holders.len() == before {
                    node.holders.reserve_exact((before / 2).max(1)); // most nodes have one holder
                }
                self.holder_slots += node.holders.capacity() - before;
                node.holders.insert(index, Holder::new(worker, stamp, 0));
                self.tenant_mut(worker).units += units;
                // The parent is no end any more: evicted, it would leave a child without its
                // prefix.
                if parent != ROOT {
                    self.dequeue_leaf(parent, worker);
                    self.holder_mut(parent, worker).below += 1;
                }
            }
        }
    }

    /// Put a leaf of `worker` at the place its stamp gives it.
    fn queue_leaf(&mut self, leaf: NodeId, worker: WorkerId) {
        self.dequeue_leaf(leaf, worker);
        let holder = self.holder_mut(leaf, worker);
        let stamp = holder.stamp();
        holder.queued = stamp;
        let before = self.tenant_mut(worker).leaves.insert(stamp, leaf);
        debug_assert!(
            before.is_none(),
            "two ends of one worker with stamp {stamp}"
        );
    }

    fn dequeue_leaf(&mut self, leaf: NodeId, worker: WorkerId) {
        let queued = std::mem::replace(&mut self.holder_mut(leaf, worker).queued, NOT_QUEUED);
        if queued != NOT_QUEUED {
            self.tenant_mut(worker).leaves.remove(&queued);
        }
    }

    // --- access

    fn next_stamp(&self) -> u64 {
        self.stamp.fetch_add(1, Ordering::Relaxed) + 1
    }

    fn place_node(&mut self, node: Node<S>) -> NodeId {
        if let Some(id) = self.free.pop() {
            self.nodes[id as usize] = node;
            return id;
        }
        // `push` alone would double the arena, half of it unused and counted in `bytes`.
        if self.nodes.len() == self.nodes.capacity() {
            self.nodes.reserve_exact(self.arena_step());
        }
        self.nodes.push(node);
        (self.nodes.len() - 1) as NodeId
    }

    fn link_child(&mut self, parent: NodeId, child: NodeId) {
        if let Some(first) = self.node(child).label.first_key() {
            let children = &mut self.nodes[parent as usize].children;
            self.inner += usize::from(children.is_empty());
            children.insert(first, child);
        }
    }

    fn node(&self, id: NodeId) -> &Node<S> {
        &self.nodes[id as usize]
    }

    /// The child whose whole label `path` begins with, and the rest of the path.
    fn descend_to_child<'p>(&self, id: NodeId, path: &'p S) -> Option<(NodeId, &'p S)> {
        let child = self.node(id).child_for(path)?;
        let label = &self.node(child).label;
        (label.common_length(path) == label.len()).then(|| (child, path.split_at(label.len()).1))
    }

    fn holder_mut(&mut self, id: NodeId, worker: WorkerId) -> &mut Holder {
        let holders = &mut self.nodes[id as usize].holders;
        let index = find_holder(holders, worker).expect("callers name a node the worker holds");
        &mut holders[index]
    }

    fn tenant_mut(&mut self, worker: WorkerId) -> &mut Tenant {
        self.tenants
            .get_mut(&worker)
            .expect("holders are tenants until the last node is released")
    }
}

impl<S: TreeSegment + ?Sized> Node<S> {
    /// Without children and holders.
    fn new(label: Box<S>, parent: NodeId) -> Self {
        Self {
            units: label.units(),
            label,
            parent,
            children: BTreeMap::new(),
            holders: Vec::new(),
        }
    }

    fn child_for(&self, rest: &S) -> Option<NodeId> {
        self.children.get(&rest.first_key()?).copied()
    }
}

#[cfg(test)]
mod model_test;
