//! Parts that chat and completion answers share.

use std::sync::Arc;

use super::json::{push_ids, push_number, push_text};
use super::{
    AnswerCounts, AnswerIds, AnswerSpec, ChoiceOutput, Delta, FinishReason, MatchedStop,
    WriteContext,
};

/// Parts of every event and answer, made once.
#[derive(Debug)]
pub struct OpenAiHead {
    pub spec: Arc<AnswerSpec>,
    pub ids: AnswerIds,
    /// Event up to the index of its choice.
    event_begin: Vec<u8>,
    /// Event without choices, up to its usage.
    last_event_begin: Vec<u8>,
    /// Whole answer up to its choices.
    whole_begin: Vec<u8>,
}

impl OpenAiHead {
    pub fn new(
        spec: Arc<AnswerSpec>,
        ids: AnswerIds,
        event_object: &str,
        whole_object: &str,
    ) -> Self {
        let event_head = members_before_choices(&spec, &ids, event_object);
        Self {
            event_begin: [b"data: ", &event_head[..], b"[{\"index\":"].concat(),
            last_event_begin: [b"data: ", &event_head[..], b"[],\"usage\":"].concat(),
            whole_begin: members_before_choices(&spec, &ids, whole_object),
            spec,
            ids,
        }
    }

    /// True if the delta has something for the client.
    pub fn is_shown(&self, delta: &Delta) -> bool {
        !delta.text.is_empty()
            || delta.finish.is_some()
            || delta.logprobs.is_some()
            || (self.spec.return_token_ids && !delta.tokens.is_empty())
    }

    /// Begins an event: what follows is the member that holds the text.
    pub fn begin_event(&self, index: usize, out: &mut Vec<u8>) {
        out.extend_from_slice(&self.event_begin);
        push_number(out, index as u64);
        out.push(b',');
    }

    /// Ends an event that has something of the delta: finish reason, ids, usage. What stands before
    /// is the value of `logprobs`.
    pub fn end_event(&self, choice: &ChoiceOutput, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        let delta = &choice.delta;
        self.push_finish_reason(delta, out);
        if self.spec.return_token_ids {
            out.extend_from_slice(b",\"token_ids\":");
            push_ids(out, &delta.tokens);
        }
        if delta.finish.is_some() {
            push_matched_stop(out, choice.matched_stop.as_ref());
        }
        self.close_event(context, out);
    }

    fn push_finish_reason(&self, delta: &Delta, out: &mut Vec<u8>) {
        out.extend_from_slice(b",\"finish_reason\":");
        match delta.finish {
            Some(FinishReason::ToolCalls) if self.spec.is_function_call() => {
                push_text(out, "function_call");
            }
            Some(reason) => push_text(out, reason.name()),
            None => out.extend_from_slice(b"null"),
        }
    }

    /// Ends an event with nothing of a delta.
    fn close_event(&self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        self.end_choice(context, out);
        out.extend_from_slice(b"}\n\n");
    }

    /// Ends the choice of an event, and writes the usage so far.
    pub fn end_choice(&self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        out.extend_from_slice(b"}]");
        if self.spec.continuous_usage_stats {
            out.extend_from_slice(b",\"usage\":");
            push_usage(out, context.usage);
        } else if self.spec.include_usage {
            out.extend_from_slice(b",\"usage\":null");
        }
    }

    /// The event with the usage of the whole answer, if it was asked for.
    pub fn write_end(&self, context: &WriteContext<'_>, out: &mut Vec<u8>) {
        if self.spec.include_usage {
            out.extend_from_slice(&self.last_event_begin);
            push_usage(out, context.usage);
            out.extend_from_slice(b"}\n\n");
        }
    }

    /// Ids of a choice's prompt, if they were asked for.
    pub fn push_prompt_ids(&self, choice: &ChoiceOutput, out: &mut Vec<u8>) {
        if self.spec.return_prompt_ids {
            out.extend_from_slice(b",\"prompt_token_ids\":");
            push_ids(out, &choice.prompt_ids);
        }
    }

    /// Ids and logprobs of a choice's prompt, if they were asked for.
    pub fn push_prompt_members(&self, choice: &ChoiceOutput, out: &mut Vec<u8>) {
        self.push_prompt_ids(choice, out);
        if let Some(objects) = choice.prompt_text.as_ref().and_then(|text| text.objects()) {
            out.extend_from_slice(b",\"prompt_logprobs\":[");
            out.extend_from_slice(objects);
            out.push(b']');
        }
    }

    /// A whole answer without its closing brace. `write_message` writes the member of a choice that
    /// holds its text, and `write_logprobs` the value of `logprobs` and members behind it.
    pub fn write_whole(
        &self,
        choices: &mut [ChoiceOutput],
        context: &WriteContext<'_>,
        out: &mut Vec<u8>,
        write_message: impl Fn(&ChoiceOutput, &mut Vec<u8>),
        write_logprobs: impl Fn(&mut ChoiceOutput, &mut Vec<u8>),
    ) {
        out.extend_from_slice(&self.whole_begin);
        out.push(b'[');
        for (place, choice) in choices.iter_mut().enumerate() {
            if place > 0 {
                out.push(b',');
            }
            out.extend_from_slice(b"{\"index\":");
            push_number(out, choice.index as u64);
            out.push(b',');
            write_message(choice, out);
            out.extend_from_slice(b",\"logprobs\":");
            if self.spec.logprobs.is_some() {
                choice.so_far.logprobs.get_or_insert_default();
            }
            write_logprobs(choice, out);
            self.push_finish_reason(&choice.so_far, out);
            push_matched_stop(out, choice.matched_stop.as_ref());
            if self.spec.return_token_ids {
                out.extend_from_slice(b",\"token_ids\":");
                push_ids(out, &choice.so_far.tokens);
            }
            out.push(b'}');
        }
        out.extend_from_slice(b"],\"usage\":");
        push_usage(out, context.usage);
    }
}

/// `{"id":…,"object":…,"created":…,"model":…,"choices":`
fn members_before_choices(spec: &AnswerSpec, ids: &AnswerIds, object: &str) -> Vec<u8> {
    let mut out = b"{\"id\":".to_vec();
    push_text(&mut out, &ids.response);
    out.extend_from_slice(b",\"object\":");
    push_text(&mut out, object);
    out.extend_from_slice(b",\"created\":");
    push_number(&mut out, spec.created);
    out.extend_from_slice(b",\"model\":");
    push_text(&mut out, &spec.model);
    out.extend_from_slice(b",\"choices\":");
    out
}

fn push_matched_stop(out: &mut Vec<u8>, matched: Option<&MatchedStop>) {
    out.extend_from_slice(b",\"matched_stop\":");
    push_stop(out, matched);
}

/// The stop token's id, the stop string, or null.
pub fn push_stop(out: &mut Vec<u8>, matched: Option<&MatchedStop>) {
    match matched {
        Some(MatchedStop::Token(id)) => push_number(out, u64::from(*id)),
        Some(MatchedStop::Text(text)) => push_text(out, text),
        None => out.extend_from_slice(b"null"),
    }
}

fn push_usage(out: &mut Vec<u8>, usage: AnswerCounts) {
    out.extend_from_slice(b"{\"prompt_tokens\":");
    push_number(out, usage.prompt_tokens);
    out.extend_from_slice(b",\"completion_tokens\":");
    push_number(out, usage.completion_tokens);
    out.extend_from_slice(b",\"total_tokens\":");
    push_number(out, usage.prompt_tokens + usage.completion_tokens);
    out.extend_from_slice(b",\"prompt_tokens_details\":{\"cached_tokens\":");
    push_number(out, usage.cached_tokens);
    out.push(b'}');
    let (accepted, rejected) = match usage.drafts {
        Some(drafts) => (Some(drafts.accepted), Some(drafts.rejected)),
        None => (None, None),
    };
    let details = [
        ("reasoning_tokens", usage.reasoning_tokens),
        ("accepted_prediction_tokens", accepted),
        ("rejected_prediction_tokens", rejected),
    ];
    push_completion_details(out, details);
    out.push(b'}');
}

/// The member with those details of the answer that are known; none without any.
fn push_completion_details(out: &mut Vec<u8>, details: [(&str, Option<u64>); 3]) {
    let mut before: &[u8] = b",\"completion_tokens_details\":{";
    let mut known = details
        .into_iter()
        .filter_map(|(name, count)| Some((name, count?)))
        .peekable();
    if known.peek().is_none() {
        return;
    }
    for (name, count) in known {
        out.extend_from_slice(before);
        push_text(out, name);
        out.push(b':');
        push_number(out, count);
        before = b",";
    }
    out.push(b'}');
}
