//! Last report of a candidate's work, and its token rates between reports: for the web page.

use crate::workers::load_report::{LoadReport, TokenTotals};

/// Shortest time between two reports from which a rate is computed: totals are a second old at most
/// [ms].
const MIN_SPAN_MS: u64 = 2_000;

/// Tokens per second between two reports.
#[derive(Debug, Clone, Copy, Default, PartialEq, serde::Serialize)]
pub struct TokenRates {
    pub prefill_tokens_per_s: f64,
    pub decode_tokens_per_s: f64,
    /// Share of the drafted tokens that were drawn; `None`: nothing was drafted.
    pub drafts_accepted: Option<f64>,
}

#[derive(Debug, Default)]
pub struct WorkerActivity {
    last: Option<(LoadReport, u64)>,
    /// Totals from which the next rate is computed, and when they were true.
    base: Option<(TokenTotals, u64)>,
    pub rates: Option<TokenRates>,
}

impl WorkerActivity {
    pub fn reported(&mut self, report: LoadReport, now_ms: u64) {
        self.last = Some((report, now_ms.saturating_sub(report.age_ms)));
        // The clock begins with the process: a report from before has no place on it.
        let (Some(totals), Some(at_ms)) = (report.totals, now_ms.checked_sub(report.age_ms)) else {
            return;
        };
        let (base, since_ms) = *self.base.get_or_insert((totals, at_ms));
        let span_ms = at_ms.saturating_sub(since_ms);
        if span_ms >= MIN_SPAN_MS {
            let per_s =
                |now: u64, before: u64| now.saturating_sub(before) as f64 * 1e3 / span_ms as f64;
            let drafted = totals.drafted.saturating_sub(base.drafted);
            let accepted = totals.accepted.saturating_sub(base.accepted);
            self.rates = Some(TokenRates {
                prefill_tokens_per_s: per_s(totals.prefilled, base.prefilled),
                decode_tokens_per_s: per_s(totals.generated, base.generated),
                drafts_accepted: (drafted > 0).then(|| accepted as f64 / drafted as f64),
            });
            self.base = Some((totals, at_ms));
        }
    }

    /// The last report, and its age [ms].
    pub fn last(&self, now_ms: u64) -> Option<(LoadReport, u64)> {
        let (report, at_ms) = self.last?;
        Some((report, now_ms.saturating_sub(at_ms)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(prefilled: u64, generated: u64, age_ms: u64) -> LoadReport {
        LoadReport {
            rank: 0,
            queued_tokens: 0,
            running: None,
            further_pages: None,
            queued_requests: None,
            totals: Some(TokenTotals {
                prefilled,
                generated,
                // Three of four drafts come true.
                drafted: generated / 30 * 4,
                accepted: generated / 30 * 3,
            }),
            age_ms,
        }
    }

    #[test]
    fn rates_are_means_between_reports_far_enough_apart() {
        let mut activity = WorkerActivity::default();
        activity.reported(report(7, 7, 9_000), 8_000);
        activity.reported(report(100, 0, 0), 10_000);
        activity.reported(report(200, 0, 0), 10_500);
        assert_eq!(activity.rates, None, "half a second says little");
        activity.reported(report(500, 30, 1_000), 13_000);
        let rates = TokenRates {
            prefill_tokens_per_s: 200.0,
            decode_tokens_per_s: 15.0,
            drafts_accepted: Some(0.75),
        };
        assert_eq!(activity.rates, Some(rates));
        assert_eq!(activity.last(14_000).map(|(_, age_ms)| age_ms), Some(2_000));
        activity.reported(report(500, 30, 0), 17_000);
        assert_eq!(activity.rates, Some(TokenRates::default()), "idle");
        // A restarted engine counts from 0.
        activity.reported(report(3, 3, 0), 22_000);
        assert_eq!(activity.rates, Some(TokenRates::default()));
    }
}
