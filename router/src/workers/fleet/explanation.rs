//! Explanations of decisions for people: names of workers in the place of their ids.

use std::sync::Arc;

use router_core::{Explanation, WorkerId};
use serde::Serialize;
use serde_json::value::{RawValue, to_raw_value};

use crate::workers::load_guard::Candidate;

/// The name of a candidate; it is in the list its decision was made from.
pub fn name_of(candidates: &[Arc<Candidate>], id: WorkerId) -> &str {
    candidates
        .iter()
        .find(|c| c.id == id)
        .map_or("unknown", |candidate| &candidate.name)
}

/// As JSON, each candidate with its name.
pub fn named(explanation: &Explanation, candidates: &[Arc<Candidate>]) -> Option<Box<RawValue>> {
    #[derive(Serialize)]
    struct Named<'a, T> {
        worker: &'a str,
        #[serde(flatten)]
        weighed: &'a T,
    }
    #[derive(Serialize)]
    struct NamedExplanation<'a, B, T> {
        policy: &'a str,
        #[serde(flatten)]
        basis: &'a B,
        candidates: Vec<Named<'a, T>>,
    }
    let Explanation {
        policy,
        basis,
        candidates: weighed,
    } = explanation;
    let weighed = weighed.iter().map(|weighed| Named {
        worker: name_of(candidates, weighed.id),
        weighed,
    });
    let explanation = NamedExplanation {
        policy,
        basis,
        candidates: weighed.collect(),
    };
    let failed = |err: &serde_json::Error| tracing::error!(%err, "cannot write an explanation");
    to_raw_value(&explanation).inspect_err(failed).ok()
}
