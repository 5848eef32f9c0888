//! Events of a response body: a worker's answer ends, breaks off, or is resumed by another worker.

use router_core::AttemptReason;

use crate::dispatch::attempt::UpstreamResponse;
use crate::dispatch::attempt_result::AttemptFailure;
use crate::dispatch::context::RequestContext;
use crate::dispatch::prefill_leg::PrefillAttempt;
use crate::dispatch::proxy_body::client_answer::ClientAnswer;
use crate::error::RouteError;
use crate::observability::access_log::AccessLogEntry;
use crate::response::failover::{BrokenStream, NotResumable};

/// The answer broke off and no event can say so: the connection to the client is cut, so that the
/// client notices.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct TruncatedResponse(pub RouteError);

/// Event that may change the phase of a body.
#[derive(strum::IntoStaticStr)]
pub enum BodyEvent {
    /// The worker ended its answer, and the answer is complete.
    AnswerCompleted,
    /// From here on no other worker could resume the stream.
    ResumeDisabled(NotResumable),
    /// The worker broke off, fell silent, or ended its stream with an error that another worker may
    /// mend.
    WorkerLost(WorkerLoss),
    /// Another worker resumes the stream.
    ResumeOpened(Box<ResumedAnswer>),
    /// No other worker resumes the stream.
    ResumeFailed(Box<RequestContext>, ResumeFailure),
}

/// End of a worker's answer before its last event.
pub struct WorkerLoss {
    pub failure: StreamFailure,
    pub reason: AttemptReason,
}

/// Answer of the worker that resumes a stream.
pub struct ResumedAnswer {
    pub request: Box<RequestContext>,
    pub opened: UpstreamResponse,
    pub prefill: Option<PrefillAttempt>,
}

/// Reason why no worker resumes a stream.
pub enum ResumeFailure {
    /// The answer of the other worker is no stream.
    NotAStream,
    Attempts(AttemptFailure),
}

/// Error that an answer ends with.
pub enum StreamFailure {
    Router(RouteError),
    /// The worker's own error event.
    Worker(BrokenStream),
}

impl StreamFailure {
    fn outcome(&self) -> &'static str {
        match self {
            StreamFailure::Router(err) => err.code(),
            StreamFailure::Worker(_) => "error_event",
        }
    }

    /// True if the worker is to blame.
    pub fn blames_worker(&self) -> bool {
        match self {
            StreamFailure::Router(err) => *err != RouteError::Draining,
            StreamFailure::Worker(broken) => broken.code.retry_class().blames_worker(),
        }
    }

    /// End the answer with this error: by an event in a stream, else by cutting the connection.
    pub fn end_answer(
        self,
        record: &mut AccessLogEntry,
        answer: &mut ClientAnswer,
    ) -> Option<TruncatedResponse> {
        record.end(answer.status, self.outcome());
        match self {
            StreamFailure::Router(err) => {
                tracing::warn!(rid = record.rid, %err, "answer broke off");
                // No event can report the error, and a complete body would look like the whole
                // answer.
                if !answer.is_stream() {
                    return Some(TruncatedResponse(err));
                }
                answer.push_error(&err);
            }
            StreamFailure::Worker(broken) => answer.push_error_event(broken.event),
        }
        None
    }
}
