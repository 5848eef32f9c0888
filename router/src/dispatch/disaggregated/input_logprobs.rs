//! Input logprobs of a pair's answer: the prefill leg has them, and the client gets the decode
//! leg's answer.
//!
//! `/generate` with `return_logprob` only; `baton_text` merges both. Memory: the prefill leg's
//! answer (`attempt` bounds it) and one event. A merged answer without a finish_reason is a failure
//! of the decode worker: the client would take the router's own answer for whole.

use std::time::Duration;

use baton_text::dialect::input_logprobs::{is_finished, merge_first_event, merge_whole};
use tokio::time::timeout;

use crate::dispatch::attempt::{AttemptError, UpstreamResponse};
use crate::dispatch::prefill_leg::PrefillAttempt;

/// The decode leg has begun, so the prefill leg's answer is complete or on its way: a stream waits
/// this long for it.
const STREAM_WAIT: Duration = Duration::from_secs(2);

/// Merge the prefill leg's input logprobs into `opened`, if they come within `limit`.
pub async fn merge_input_logprobs(
    mut opened: UpstreamResponse,
    prefill: &mut PrefillAttempt,
    limit: Duration,
) -> Result<UpstreamResponse, AttemptError> {
    let wait = if opened.is_sse {
        limit.min(STREAM_WAIT)
    } else {
        limit
    };
    if prefill.response.is_none() {
        let _ = timeout(wait, prefill.ended()).await; // `response` is there if it ended well
    }
    let Some(response) = prefill.response.as_ref().map(|response| response.concat()) else {
        tracing::debug!("the prefill leg sent no input logprobs");
        return Ok(opened);
    };
    let pieces = &mut opened.answer.pieces;
    if !opened.is_sse {
        let whole = pieces.concat();
        if let Some(merged) = merge_whole(&response, &whole) {
            if !is_finished(&whole) {
                return Err(opened.unfinished());
            }
            *pieces = vec![merged];
            opened.is_merged = true;
        }
    } else if let Some(merged) = pieces
        .first()
        .and_then(|run| merge_first_event(&response, run))
    {
        pieces[0] = merged;
        opened.is_merged = true;
    }
    Ok(opened)
}
