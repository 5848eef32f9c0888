//! The tree against a naive model: for each worker a list of (prefix, stamp). Texts and block
//! chains are both tried: a chain is the text's characters as numbers.

use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::*;

impl<S: TreeSegment + ?Sized> PrefixTree<S> {
    /// Nodes beside the root, and bytes of their labels; shared prefixes count once.
    pub fn nodes_and_label_bytes(&self) -> (usize, usize) {
        (self.nodes.len() - self.free.len() - 1, self.label_bytes)
    }
}

const WORKERS: u64 = 3;
/// One to four bytes long; é and è share their first byte.
const ALPHABET: [char; 5] = ['a', 'b', 'é', 'è', '🦀'];

#[derive(Debug, Clone)]
enum Op {
    Add(u64),
    Insert {
        worker: u64,
        text: String,
    },
    /// Steps of the policy: touch, and insert only if that was not enough.
    Send {
        worker: u64,
        text: String,
    },
    /// An insert, then others, then the first is taken back.
    SendAndRetract {
        worker: u64,
        text: String,
        between: Vec<(u64, String)>,
    },
    Match {
        text: String,
        ready: Vec<u64>,
    },
    Evict,
    Retire {
        worker: u64,
        batch: usize,
    },
}

fn text() -> impl Strategy<Value = String> {
    proptest::collection::vec(proptest::sample::select(ALPHABET.to_vec()), 0..9)
        .prop_map(|chars| chars.into_iter().collect())
}

fn op() -> impl Strategy<Value = Op> {
    let worker = 0..WORKERS;
    prop_oneof![
        1 => worker.clone().prop_map(Op::Add),
        4 => (worker.clone(), text()).prop_map(|(worker, text)| Op::Insert { worker, text }),
        6 => (worker.clone(), text()).prop_map(|(worker, text)| Op::Send { worker, text }),
        6 => (text(), proptest::sample::subsequence(vec![0, 1, 2], 0..=3))
            .prop_map(|(text, ready)| Op::Match { text, ready }),
        2 => (worker.clone(), text(), proptest::collection::vec((worker.clone(), text()), 0..3))
            .prop_map(|(worker, text, between)| Op::SendAndRetract { worker, text, between }),
        1 => Just(Op::Evict),
        1 => (worker, 1usize..4).prop_map(|(worker, batch)| Op::Retire { worker, batch }),
    ]
}

/// Texts of the model in the tree's own type.
trait Spelled: TreeSegment {
    fn spell(text: &str) -> Box<Self>;
    fn read(&self) -> String;
}

impl Spelled for str {
    fn spell(text: &str) -> Box<str> {
        text.into()
    }

    fn read(&self) -> String {
        self.to_owned()
    }
}

impl Spelled for [u64] {
    fn spell(text: &str) -> Box<[u64]> {
        text.chars().map(u64::from).collect()
    }

    fn read(&self) -> String {
        let char_of = |unit: &u64| char::from_u32(*unit as u32).expect("it was a character");
        self.iter().map(char_of).collect()
    }
}

/// All the prefixes a worker holds, each with the stamp of the last text that covered it.
#[derive(Default)]
struct Model {
    held: BTreeMap<u64, Vec<(String, u64)>>,
    stamp: u64,
    limit: usize,
}

impl Model {
    fn send(&mut self, worker: u64, text: &str) {
        self.stamp += 1;
        let Some(held) = self.held.get_mut(&worker) else {
            return;
        };
        for prefix in prefixes(text) {
            held.retain(|(other, _)| other != prefix);
            held.push((prefix.to_owned(), self.stamp));
        }
        while held.len() > self.limit {
            let oldest = held
                .iter()
                .map(|(_, stamp)| *stamp)
                .min()
                .expect("not empty");
            let longest = held
                .iter()
                .filter(|(_, stamp)| *stamp == oldest)
                .max_by_key(|(prefix, _)| prefix.len());
            let victim = longest.expect("not empty").0.clone();
            held.retain(|(prefix, _)| *prefix != victim);
        }
    }

    /// The prefixes of `text` beyond the first `keep` characters that only the send with this stamp
    /// gave to `worker`.
    fn retract(&mut self, worker: u64, text: &str, stamp: u64, keep: usize) {
        if let Some(held) = self.held.get_mut(&worker) {
            let is_claimed =
                |prefix: &str| prefix.chars().count() > keep && text.starts_with(prefix);
            held.retain(|(prefix, at)| *at != stamp || !is_claimed(prefix));
        }
    }

    /// How many characters of `text` a worker holds.
    fn held_by(&self, worker: u64, text: &str) -> usize {
        let held = self.held.get(&worker).into_iter().flatten();
        let of_text = held.filter(|(prefix, _)| text.starts_with(prefix.as_str()));
        of_text
            .map(|(prefix, _)| prefix.chars().count())
            .max()
            .unwrap_or(0)
    }

    fn longest_match(&self, text: &str, ready: &[u64]) -> (usize, Vec<u64>) {
        let holders = |prefix: &str| -> Vec<u64> {
            let holds = |worker: &u64| {
                self.held
                    .get(worker)
                    .is_some_and(|held| held.iter().any(|(other, _)| other == prefix))
            };
            ready.iter().copied().filter(holds).collect()
        };
        prefixes(text)
            .map(|prefix| (prefix.chars().count(), holders(prefix)))
            .filter(|(_, holders)| !holders.is_empty())
            .last()
            .unwrap_or((0, Vec::new()))
    }
}

/// Non-empty prefixes, shortest first.
fn prefixes(text: &str) -> impl Iterator<Item = &str> {
    text.char_indices()
        .map(|(at, c)| &text[..at + c.len_utf8()])
}

fn views(ids: &[u64]) -> Vec<WorkerView> {
    ids.iter()
        .map(|&id| WorkerView {
            id: WorkerId(id),
            load: 0,
            host: 0,
        })
        .collect()
}

/// Prefixes a worker holds, by the tree: every one, character by character.
fn held_in_tree<S: Spelled + ?Sized>(tree: &PrefixTree<S>, worker: u64) -> BTreeSet<String>
where
    Box<S>: Default + for<'a> From<&'a S>,
{
    let mut found = BTreeSet::new();
    let mut todo = vec![(ROOT, String::new())];
    while let Some((id, above)) = todo.pop() {
        for &child in tree.node(id).children.values() {
            let node = tree.node(child);
            if find_holder(&node.holders, WorkerId(worker)).is_ok() {
                let whole = format!("{above}{}", node.label.read());
                found.extend(
                    prefixes(&whole)
                        .filter(|prefix| prefix.len() > above.len())
                        .map(str::to_owned),
                );
                todo.push((child, whole));
            }
        }
    }
    found
}

/// The invariants of the module, and that the running sums are right.
fn check<S: Spelled + ?Sized>(tree: &PrefixTree<S>)
where
    Box<S>: Default + for<'a> From<&'a S>,
{
    let mut seen = 0;
    let mut label_bytes = 0;
    let mut slots = 0;
    let mut inner = 0;
    let mut units: BTreeMap<WorkerId, usize> = BTreeMap::new();
    let mut leaves: BTreeMap<WorkerId, BTreeMap<u64, NodeId>> = BTreeMap::new();
    let mut todo = vec![ROOT];
    while let Some(id) = todo.pop() {
        let node = tree.node(id);
        seen += 1;
        inner += usize::from(!node.children.is_empty());
        for (&first, &child) in &node.children {
            assert_eq!(tree.node(child).parent, id);
            assert_eq!(tree.node(child).label.first_key(), Some(first));
            todo.push(child);
        }
        if id == ROOT {
            assert!(node.label.is_empty() && node.holders.is_empty());
            continue;
        }
        assert!(!node.label.is_empty() && !node.holders.is_empty());
        assert_eq!(node.units, node.label.units());
        assert!(node.holders.is_sorted_by(|a, b| a.worker < b.worker));
        label_bytes += size_of_val(&*node.label);
        slots += node.holders.capacity();
        for holder in &node.holders {
            let goes_on =
                |child: &&NodeId| find_holder(&tree.node(**child).holders, holder.worker).is_ok();
            let below = node.children.values().filter(goes_on).count();
            assert_eq!(holder.below as usize, below);
            assert_eq!(holder.queued == NOT_QUEUED, below > 0);
            assert!(holder.queued <= holder.stamp());
            *units.entry(holder.worker).or_default() += node.units;
            if below == 0 {
                leaves
                    .entry(holder.worker)
                    .or_default()
                    .insert(holder.queued, id);
            }
            if node.parent != ROOT {
                let above = &tree.node(node.parent).holders;
                let at = find_holder(above, holder.worker).expect("a holder holds the parent too");
                assert!(above[at].stamp() >= holder.stamp());
            }
        }
    }
    assert_eq!(
        seen,
        tree.nodes.len() - tree.free.len(),
        "every slot is reachable or free"
    );
    assert_eq!(
        (label_bytes, slots, inner),
        (tree.label_bytes, tree.holder_slots, tree.inner)
    );
    for (worker, tenant) in &tree.tenants {
        assert_eq!(tenant.units, units.remove(worker).unwrap_or(0));
        assert!(tenant.units <= tenant.limit);
        assert_eq!(tenant.leaves, leaves.remove(worker).unwrap_or_default());
    }
    assert!(units.is_empty(), "only tenants hold");
}

fn step<S: Spelled + ?Sized>(tree: &mut PrefixTree<S>, model: &mut Model, op: &Op)
where
    Box<S>: Default + for<'a> From<&'a S>,
{
    match op {
        Op::Add(worker) => {
            tree.add_worker(WorkerId(*worker), model.limit);
            model.held.entry(*worker).or_default();
        }
        Op::Insert { worker, text } => {
            tree.insert(WorkerId(*worker), &S::spell(text));
            model.send(*worker, text);
        }
        Op::Send { worker, text } => {
            if !tree.touch_path(WorkerId(*worker), &S::spell(text)) {
                tree.insert(WorkerId(*worker), &S::spell(text));
            }
            model.send(*worker, text);
        }
        Op::SendAndRetract {
            worker,
            text,
            between,
        } => {
            let path = S::spell(text);
            let keep = model.held_by(*worker, text);
            let stamp = tree.insert(WorkerId(*worker), &path);
            model.send(*worker, text);
            let stamp_in_model = model.stamp;
            for (other, text) in between {
                tree.insert(WorkerId(*other), &S::spell(text));
                model.send(*other, text);
            }
            tree.retract(WorkerId(*worker), &path, stamp, keep);
            model.retract(*worker, text, stamp_in_model, keep);
        }
        Op::Match { text, ready } => {
            let ready_views = views(ready);
            let path = S::spell(text);
            let found = tree.longest_match(&path, &ready_views);
            let holders: Vec<u64> = ready
                .iter()
                .copied()
                .filter(|&worker| found.is_held_by(WorkerId(worker)))
                .collect();
            assert_eq!((found.units, holders), model.longest_match(text, ready));
            let ids: Vec<WorkerId> = ready.iter().copied().map(WorkerId).collect();
            let mut held = vec![9; ids.len()];
            let deepest = tree.held_by(&path, &ids, &mut held);
            let of = |worker: &u64| model.held_by(*worker, text);
            assert_eq!(held, ready.iter().map(of).collect::<Vec<_>>());
            let everybody: Vec<u64> = model.held.keys().copied().collect();
            assert_eq!(deepest, everybody.iter().map(of).max().unwrap_or(0));
        }
        Op::Evict => assert_eq!(tree.evict(), 0, "inserts keep the limit"),
        Op::Retire { worker, batch } => {
            while tree.retire_worker(WorkerId(*worker), *batch) {
                check(tree);
                tree.insert(WorkerId(*worker), &S::spell("ab")); // too late, ignored
            }
            model.held.remove(worker);
        }
    }
}

fn tree_equals_model<S: Spelled + ?Sized>(limit: usize, ops: &[Op])
where
    Box<S>: Default + for<'a> From<&'a S>,
{
    let mut tree = PrefixTree::<S>::new(usize::MAX);
    let mut model = Model {
        limit,
        ..Model::default()
    };
    for worker in 0..WORKERS - 1 {
        step(&mut tree, &mut model, &Op::Add(worker)); // the last one comes later or never
    }
    for op in ops {
        step(&mut tree, &mut model, op);
        check(&tree);
        for worker in 0..WORKERS {
            let held = model.held.get(&worker).into_iter().flatten();
            let expected: BTreeSet<String> = held.map(|(prefix, _)| prefix.clone()).collect();
            assert_eq!(tree.units_of(WorkerId(worker)), expected.len());
            assert_eq!(held_in_tree(&tree, worker), expected);
        }
    }
    for worker in 0..WORKERS {
        step(&mut tree, &mut model, &Op::Retire { worker, batch: 2 });
    }
    assert_eq!(tree.nodes_and_label_bytes(), (0, 0));
    assert_eq!((tree.tenants.len(), tree.holder_slots), (0, 0));
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 1000, ..ProptestConfig::default() })]

    #[test]
    fn tree_of_text_equals_naive_model(limit in 0usize..24, ops in proptest::collection::vec(op(), 1..60)) {
        tree_equals_model::<str>(limit, &ops);
    }

    #[test]
    fn tree_of_blocks_equals_naive_model(limit in 0usize..24, ops in proptest::collection::vec(op(), 1..60)) {
        tree_equals_model::<[u64]>(limit, &ops);
    }

    /// The model does not predict what is evicted; enough must be, and the tree must stay sound.
    #[test]
    fn memory_is_bounded_after_every_insert(
        max_bytes in 6_000usize..20_000,
        texts in proptest::collection::vec((0..WORKERS, "[abé]{0,3}[ab]{0,40}"), 1..150),
    ) {
        let mut tree = PrefixTree::<str>::new(max_bytes);
        (0..WORKERS).for_each(|worker| tree.add_worker(WorkerId(worker), usize::MAX));
        for (worker, text) in &texts {
            tree.insert(WorkerId(*worker), text);
            prop_assert!(tree.bytes() <= max_bytes, "{} of {max_bytes}", tree.bytes());
            check(&tree);
        }
        // The newest text is the last to go.
        if let Some((worker, text)) = texts.last() {
            let found = tree.longest_match(text, &views(&[*worker])).units;
            prop_assert_eq!(found, text.chars().count());
        }
    }

    #[test]
    fn common_prefix_is_that_of_the_characters(a in text(), b in text(), same in text(), times in 0usize..60) {
        let same = same.repeat(times); // long enough to cross blocks
        let a = format!("{same}{a}");
        let b = format!("{same}{b}");
        let by_chars: usize =
            a.chars().zip(b.chars()).take_while(|(x, y)| x == y).map(|(c, _)| c.len_utf8()).sum();
        prop_assert_eq!(a.common_length(&b), by_chars);
        let units: usize = a.chars().zip(b.chars()).take_while(|(x, y)| x == y).count();
        prop_assert_eq!(<[u64]>::spell(&a).common_length(&<[u64]>::spell(&b)), units);
    }
}

fn tree_of(limit: usize, workers: u64) -> PrefixTree<str> {
    let mut tree = PrefixTree::new(usize::MAX);
    (0..workers).for_each(|worker| tree.add_worker(WorkerId(worker), limit));
    tree
}

#[test]
fn oldest_text_is_forgotten_first_from_its_end() {
    let mut tree = tree_of(12, 1);
    tree.insert(WorkerId(0), "aaaa");
    tree.insert(WorkerId(0), "bbbb");
    tree.insert(WorkerId(0), "cccc");
    assert!(tree.touch_path(WorkerId(0), "aaaa"));
    tree.insert(WorkerId(0), "dddddd");
    let matched = |text| tree.longest_match(text, &views(&[0])).units;
    assert_eq!(
        ["aaaa", "bbbb", "cccc", "dddddd"].map(matched),
        [4, 0, 2, 6]
    );
    assert_eq!(tree.evicted_units_total, 6);
}

#[test]
fn text_above_the_limit_keeps_its_start() {
    let mut tree = tree_of(5, 1);
    tree.insert(WorkerId(0), "ééééé🦀🦀");
    assert_eq!(tree.longest_match("ééééé🦀🦀", &views(&[0])).units, 5);
    assert_eq!(tree.units_of(WorkerId(0)), 5);
}

#[test]
fn split_is_undone_when_the_branch_is_gone() {
    let mut tree = tree_of(1000, 2);
    for text in [
        "system prompt, question one",
        "system prompt, answer",
        "system",
    ] {
        tree.insert(WorkerId(1), text);
    }
    tree.insert(WorkerId(0), "system prompt, question one");
    while tree.retire_worker(WorkerId(1), 1) {}
    assert_eq!(tree.nodes_and_label_bytes(), (1, 27));
}

#[test]
fn split_is_undone_when_the_sibling_is_evicted() {
    let mut tree = tree_of(15, 1);
    tree.insert(WorkerId(0), "shared old");
    tree.insert(WorkerId(0), "shared newer one");
    assert_eq!(
        (tree.nodes_and_label_bytes().0, tree.units_of(WorkerId(0))),
        (1, 15)
    );
}

#[test]
fn depth_costs_no_stack() {
    let depth = 6_000;
    let mut tree = tree_of(usize::MAX, 1);
    let text = "x".repeat(depth);
    for end in (1..=depth).rev() {
        tree.insert(WorkerId(0), &text[..end]); // every prefix once: a chain of one-character nodes
    }
    assert_eq!(
        (
            tree.nodes_and_label_bytes().0,
            tree.longest_match(&text, &views(&[0])).units
        ),
        (depth, depth)
    );
    while tree.retire_worker(WorkerId(0), 100) {}
    assert_eq!(tree.nodes_and_label_bytes().0, 0);
}

#[test]
fn many_branches_of_one_hot_prefix_stay_within_the_limit() {
    let mut tree = tree_of(20_000, 4);
    let hot = "You answer briefly. ".repeat(50);
    for i in 0..2_000u64 {
        tree.insert(WorkerId(i % 4), &format!("{hot}{i:05} {}", "y".repeat(94)));
    }
    check(&tree);
    assert!(
        tree.units_by_worker()
            .iter()
            .all(|&(_, chars)| chars == 20_000)
    );
    // 1000 shared and 4 × 190 tails of 100 characters.
    let (nodes, label_bytes) = tree.nodes_and_label_bytes();
    assert!(label_bytes < 1_000 + 4 * 19_100, "{label_bytes}");
    assert!(nodes < 4 * 190 * 2, "{nodes}");
}
