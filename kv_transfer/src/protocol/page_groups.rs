//! Page groups: what a node's pages hold, by logical coordinates.
//!
//! The engine describes its groups once, with the pool. The descriptors travel in HELLO and in PUT
//! /route. This crate compares them and gives no coordinate a meaning: pages are exchanged only
//! between nodes whose layouts are equal, and a refusal names the first coordinate that differs.

use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write as _;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Number of a page group, unique within a layout and equal on nodes that exchange its pages.
pub type GroupId = u32;

/// Most groups of a layout, and so of one message.
pub const MAX_GROUPS: usize = 16;
/// Fact of a layout that covers the coordinates of all groups, also those that this build does not
/// know.
const GROUPS_HASH: &str = "groups_hash";

/// Ascending numbers: the first one, and the one after the last.
type NumberRange = (u32, u32);

#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct GroupDescriptor {
    pub id: GroupId,
    /// Which tokens of a sequence have pages.
    pub kind: String,
    /// Layers by their numbers in the whole model.
    pub layers: Vec<NumberRange>,
    /// KV heads by their numbers in the whole model.
    pub heads: Vec<NumberRange>,
    /// Axes of a page in the order of its bytes, separated by commas; `name=size` where no other
    /// coordinate gives the size.
    pub dims: String,
    pub dtype: String,
    pub page_tokens: u32,
    pub page_bytes: u64,
    /// How long a sequence's pages are kept.
    pub retain: String,
    /// Hash of the numbers by which codes in the pages are multiplied.
    #[serde(default = "unscaled")]
    pub scales: String,
    /// In a group of states: which tokens of a prompt its state has seen; empty in others.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub tokens_at: String,
}

/// Scales of pages that hold no codes.
fn unscaled() -> String {
    "none".to_owned()
}

/// The items of a call or message in the order of the `own` groups.
///
/// `Err`: the items are not exactly one for each of these groups, and which group is at fault.
pub fn one_per_group<'a, T>(
    own: &[GroupId],
    items: &'a [T],
    group_of: impl Fn(&T) -> GroupId,
) -> Result<Vec<&'a T>, String> {
    let unknown = items.iter().map(&group_of).find(|id| !own.contains(id));
    if let Some(group) = unknown {
        return Err(unknown_group(group, own));
    }
    let mut ordered = Vec::with_capacity(own.len());
    for &group in own {
        let mut named = items.iter().filter(|item| group_of(item) == group);
        let Some(item) = named.next() else {
            return Err(format!("page group {group} of {own:?} is missing"));
        };
        if named.next().is_some() {
            return Err(format!("page group {group} is named twice"));
        }
        ordered.push(item);
    }
    Ok(ordered)
}

/// Why a page group is refused that is none of the `own` ones.
pub fn unknown_group(group: GroupId, own: &[GroupId]) -> String {
    format!("page group {group}, but there are {own:?}")
}

impl GroupDescriptor {
    /// The first coordinate that differs, as `NAME OWN against THEIRS`.
    fn first_difference(&self, theirs: &Self) -> Option<String> {
        if let Some(difference) = differing_axis(&self.dims, &theirs.dims) {
            return Some(difference);
        }
        // The bytes of a page follow from the other coordinates, so they come last.
        let coordinates = [
            ("kind", self.kind.clone(), theirs.kind.clone()),
            ("layers", to_text(&self.layers), to_text(&theirs.layers)),
            ("heads", to_text(&self.heads), to_text(&theirs.heads)),
            ("dtype", self.dtype.clone(), theirs.dtype.clone()),
            (
                "page_tokens",
                self.page_tokens.to_string(),
                theirs.page_tokens.to_string(),
            ),
            ("retain", self.retain.clone(), theirs.retain.clone()),
            ("scales", self.scales.clone(), theirs.scales.clone()),
            (
                "tokens_at",
                self.tokens_at.clone(),
                theirs.tokens_at.clone(),
            ),
            (
                "page_bytes",
                self.page_bytes.to_string(),
                theirs.page_bytes.to_string(),
            ),
        ];
        coordinates
            .into_iter()
            .find(|(_, own, other)| own != other)
            .map(|(name, own, other)| format!("{name} {own} against {other}"))
    }
}

/// The first axis whose size differs; the whole order where the axes themselves do.
fn differing_axis(own: &str, theirs: &str) -> Option<String> {
    if own == theirs {
        return None;
    }
    let axes = |dims: &str| -> Vec<(String, String)> {
        dims.split(',')
            .map(|axis| axis.split_once('=').unwrap_or((axis, "")))
            .map(|(name, size)| (name.to_owned(), size.to_owned()))
            .collect()
    };
    let own_axes = axes(own);
    let their_axes = axes(theirs);
    let names_agree = own_axes
        .iter()
        .map(|axis| &axis.0)
        .eq(their_axes.iter().map(|axis| &axis.0));
    let sized = own_axes
        .iter()
        .zip(&their_axes)
        .find(|(a, b)| names_agree && a != b)
        .map(|((name, a), (_, b))| format!("{name} {a} against {b}"));
    Some(sized.unwrap_or_else(|| format!("dims {own} against {theirs}")))
}

fn to_text(ranges: &[NumberRange]) -> String {
    let mut text = String::from("[");
    for (i, (first, end)) in ranges.iter().enumerate() {
        let comma = if i == 0 { "" } else { ", " };
        // Writing to a String cannot fail.
        let _ = write!(text, "{comma}{first}..{end}");
    }
    text + "]"
}

/// What the engine states of its pages, for comparison with a peer's.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PageLayout {
    pub groups: Vec<GroupDescriptor>,
    /// Further facts by name: the model, the number of ranks that share a page's heads.
    #[serde(flatten)]
    pub facts: BTreeMap<String, Value>,
}

impl PageLayout {
    pub fn group_ids(&self) -> Vec<GroupId> {
        self.groups.iter().map(|group| group.id).collect()
    }

    /// The first difference between the own layout and a peer's, as `NAME OWN against THEIRS`;
    /// `None` if they are equal.
    pub fn first_difference(&self, theirs: &Self) -> Option<String> {
        if self == theirs {
            return None;
        }
        let own = self.group_ids();
        let other = theirs.group_ids();
        if own != other {
            return Some(format!("page groups {own:?} against {other:?}"));
        }
        let in_group = self
            .groups
            .iter()
            .zip(&theirs.groups)
            .find_map(|(own, other)| {
                let difference = own.first_difference(other)?;
                Some(format!("page group {}: {difference}", own.id))
            });
        in_group.or_else(|| self.differing_fact(theirs))
    }

    fn differing_fact(&self, theirs: &Self) -> Option<String> {
        let names: BTreeSet<&String> = self.facts.keys().chain(theirs.facts.keys()).collect();
        let value_of = |layout: &Self, name: &str| match layout.facts.get(name) {
            Some(Value::String(text)) => text.clone(),
            Some(value) => value.to_string(),
            None => "none".to_owned(),
        };
        let mut differing: Vec<&String> = names
            .into_iter()
            .filter(|name| self.facts.get(*name) != theirs.facts.get(*name))
            .collect();
        // The hash explains nothing while another fact does.
        differing.sort_by_key(|name| *name == GROUPS_HASH);
        let name = differing.first()?;
        let own = value_of(self, name);
        let other = value_of(theirs, name);
        Some(format!("{name} {own} against {other}"))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    pub(crate) fn layout(page_bytes: u64) -> PageLayout {
        let group = GroupDescriptor {
            id: 0,
            kind: "full".into(),
            layers: vec![(0, 24)],
            heads: vec![(0, 2)],
            dims: "layer,kv=2,slot,head,head_dim=64".into(),
            dtype: "bfloat16".into(),
            page_tokens: 16,
            page_bytes,
            retain: "all".into(),
            scales: unscaled(),
            tokens_at: String::new(),
        };
        let facts = [("model_hash", "m"), (GROUPS_HASH, "g")]
            .map(|(name, value)| (name.to_owned(), Value::from(value)));
        PageLayout {
            groups: vec![group],
            facts: facts.into(),
        }
    }

    #[test]
    fn items_are_ordered_by_group_and_the_group_at_fault_is_named() {
        let check = |items: &[GroupId]| {
            one_per_group(&[4, 9], items, |id| *id)
                .map(|ordered| ordered.into_iter().copied().collect::<Vec<_>>())
        };
        assert_eq!(check(&[9, 4]), Ok(vec![4, 9]));
        for (items, reason) in [
            (&[4][..], "page group 9 of [4, 9] is missing"),
            (&[], "page group 4 of [4, 9] is missing"),
            (&[4, 9, 4], "page group 4 is named twice"),
            (&[4, 5, 9], "page group 5, but there are [4, 9]"),
        ] {
            assert_eq!(check(items), Err(reason.to_owned()));
        }
    }

    #[test]
    fn first_differing_coordinate_is_named_with_both_values() {
        let own = layout(4096);
        assert_eq!(own.first_difference(&own), None);
        for (change, expected) in [
            (
                (|it| it.groups[0].dims = "layer,kv=2,slot,head,head_dim=128".into())
                    as fn(&mut PageLayout),
                "page group 0: head_dim 64 against 128",
            ),
            (
                |it| it.groups[0].dims = "layer,kv=2,head,slot,head_dim=64".into(),
                "page group 0: dims layer,kv=2,slot,head,head_dim=64 against \
                 layer,kv=2,head,slot,head_dim=64",
            ),
            (
                |it| it.groups[0].dims = "layer,kv=2,slot,head,head_dim=60+4".into(),
                "page group 0: head_dim 64 against 60+4",
            ),
            (
                |it| it.groups[0].layers = vec![(0, 12), (14, 24)],
                "page group 0: layers [0..24] against [0..12, 14..24]",
            ),
            (
                |it| it.groups[0].heads = vec![(2, 4)],
                "page group 0: heads [0..2] against [2..4]",
            ),
            (
                |it| it.groups[0].kind = "window".into(),
                "page group 0: kind full against window",
            ),
            (
                |it| it.groups[0].dtype = "float16".into(),
                "page group 0: dtype bfloat16 against float16",
            ),
            (
                |it| {
                    it.groups[0].dtype = "fp8_e4m3".into();
                    it.groups[0].scales = "5d".into();
                    it.groups[0].page_bytes = 2048;
                },
                "page group 0: dtype bfloat16 against fp8_e4m3",
            ),
            (
                |it| it.groups[0].scales = "5d".into(),
                "page group 0: scales none against 5d",
            ),
            (
                |it| {
                    it.groups[0].page_tokens = 32;
                    it.groups[0].page_bytes = 8192;
                },
                "page group 0: page_tokens 16 against 32",
            ),
            (
                |it| it.groups[0].retain = "last 64".into(),
                "page group 0: retain all against last 64",
            ),
            (
                |it| it.groups[0].tokens_at = "N".into(),
                "page group 0: tokens_at  against N",
            ),
            (
                |it| it.groups[0].page_bytes = 1,
                "page group 0: page_bytes 4096 against 1",
            ),
            (|it| it.groups[0].id = 3, "page groups [0] against [3]"),
            (|it| it.groups.clear(), "page groups [0] against []"),
            (
                |it| {
                    it.facts.insert("groups_hash".into(), "h".into());
                    it.facts.insert("model_hash".into(), "n".into());
                },
                "model_hash m against n",
            ),
            (
                |it| drop(it.facts.insert("tp_size".into(), 2.into())),
                "tp_size none against 2",
            ),
            (
                |it| drop(it.facts.insert("groups_hash".into(), "h".into())),
                "groups_hash g against h",
            ),
        ] {
            let mut theirs = own.clone();
            change(&mut theirs);
            assert_eq!(own.first_difference(&theirs).as_deref(), Some(expected));
        }
    }

    #[test]
    fn coordinates_of_a_later_version_are_read_over_and_facts_are_kept() {
        let json = r#"{"groups": [{"id": 0, "kind": "full", "layers": [[0, 24]], "heads": [[0, 2]], "dims": "layer,kv=2,slot,head,head_dim=64", "dtype": "bfloat16", "page_tokens": 16, "page_bytes": 4096, "retain": "all", "shade": "none"}], "groups_hash": "g", "model_hash": "m"}"#;
        let read: PageLayout = serde_json::from_str(json).expect("a layout");
        assert_eq!(read, layout(4096));
        let packed = rmp_serde::to_vec_named(&read).expect("plain data");
        assert_eq!(
            rmp_serde::from_slice::<PageLayout>(&packed).expect("the same"),
            read
        );
    }
}
