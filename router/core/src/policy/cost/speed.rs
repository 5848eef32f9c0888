//! Duration of a prefill, learned from observations.
//!
//! ```text
//! T(u, h) = a + b·u + c·u·(h + u/2)       u tokens to compute behind h cached ones; the last term is attention
//! ```
//!
//! An answer that does not stream shows only when all of it is there: T + d·o for o tokens of
//! output. It is fitted with the others, so that d absorbs the time of decoding.
//!
//! One T for the fleet, by least squares with forgetting over observations, each weighted so that
//! relative errors count alike. Terms that the observations leave open (all prompts of one size, or
//! no observation yet) come from the prior's shape, scaled to them.
//!
//! A worker's own pace is one factor on it ([`ObservedPace`]), and deliberately slow to believe: a
//! worker that is thought slow gets nothing at low load, so nothing would ever correct a wrong
//! belief (measured: one cold first prompt of 100 ms, and a second worker was never used again).
//! The first observation of a worker is dropped, each counts within bounds, a quarter of difference
//! counts as none, and a belief fades when nothing new is seen.

/// Terms of T for one prompt, or the sum over several, scaled to numbers around one.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct PrefillWork([f64; 4]);

impl PrefillWork {
    pub fn of_prompt(uncached: f64, cached: f64) -> Self {
        let attention = uncached * (cached + uncached / 2.0);
        PrefillWork([1.0, uncached / 1e3, attention / 1e8, 0.0])
    }

    /// With the tokens of its answer.
    pub fn with_output(self, tokens: f64) -> Self {
        let PrefillWork([fixed, linear, attention, _]) = self;
        PrefillWork([fixed, linear, attention, tokens / 1e2])
    }

    pub fn plus(self, other: PrefillWork) -> PrefillWork {
        PrefillWork([0, 1, 2, 3].map(|i| self.0[i] + other.0[i]))
    }
}

/// Coefficients of T, in milliseconds; none is negative.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct PrefillSpeed([f64; 4]);

impl Default for PrefillSpeed {
    /// 10 000 tokens a second, about an 8 B model on one recent GPU, and 10 ms a token of output.
    fn default() -> Self {
        PrefillSpeed([5.0, 100.0, 0.0, 1_000.0])
    }
}

impl PrefillSpeed {
    pub fn duration_ms(&self, work: PrefillWork) -> f64 {
        dot_product(self.0, work.0)
    }

    fn scaled_by(self, factor: f64) -> Self {
        PrefillSpeed(self.0.map(|value| value * factor))
    }
}

/// How much slower than the fleet a worker is.
#[derive(Debug, Clone, Copy, Default)]
pub struct ObservedPace {
    /// Sum of observed over predicted times, and their number, decayed.
    ratios: f64,
    seen: f64,
    at_ms: f64,
}

impl ObservedPace {
    /// Observations that count; as many as the last few seconds of a busy worker bring.
    const MEMORY: f64 = 50.0;
    /// "As fast as the fleet" counts for this many observations.
    const PRIOR_SAMPLES: f64 = 5.0;
    /// Most that one observation counts.
    const MOST: f64 = 8.0;
    /// Differences below this factor are taken for noise.
    const NOISE: f64 = 1.25;
    /// A belief fades with this time constant [ms].
    const FADES_MS: f64 = 60_000.0;

    pub fn observe_duration(&mut self, predicted_ms: f64, took_ms: f64, now_ms: f64) {
        let ratio = took_ms / predicted_ms.max(1e-3);
        let keep = 1.0 - 1.0 / Self::MEMORY;
        self.ratios = self.ratios * keep + ratio.clamp(1.0 / Self::MOST, Self::MOST);
        self.seen = self.seen * keep + 1.0;
        self.at_ms = now_ms;
    }

    fn slowdown_factor(&self, now_ms: f64) -> f64 {
        let believed = (self.ratios + Self::PRIOR_SAMPLES) / (self.seen + Self::PRIOR_SAMPLES);
        let beyond_noise = match believed {
            slower if slower > Self::NOISE => slower / Self::NOISE,
            faster if faster < 1.0 / Self::NOISE => faster * Self::NOISE,
            _ => 1.0,
        };
        let fresh = ((self.at_ms - now_ms) / Self::FADES_MS).exp().min(1.0);
        beyond_noise.powf(fresh)
    }

    /// The worker's T, given the fleet's.
    pub fn worker_speed(&self, fleet: PrefillSpeed, now_ms: f64) -> PrefillSpeed {
        if self.seen == 0.0 {
            fleet
        } else {
            fleet.scaled_by(self.slowdown_factor(now_ms))
        }
    }
}

/// Observations per effective memory: what is older than this many counts little.
const MEMORY: f64 = 200.0;
/// Prompts by which the prior speaks [uncached tokens]; each counts for a fraction of an
/// observation.
const PRIOR_AT: [f64; 3] = [100.0, 1_000.0, 10_000.0];
const PRIOR_WEIGHT: f64 = 0.03;
/// Answer by which the prior speaks of output [tokens].
const PRIOR_OUTPUT: f64 = 256.0;

/// Sums of least squares.
#[derive(Debug, Clone, Default)]
pub struct SpeedFit {
    xx: [[f64; 4]; 4],
    xy: [f64; 4],
}

impl SpeedFit {
    /// `work` took `ms`.
    pub fn observe_duration(&mut self, work: PrefillWork, ms: f64) {
        let keep = 1.0 - 1.0 / MEMORY;
        self.xx
            .as_flattened_mut()
            .iter_mut()
            .for_each(|sum| *sum *= keep);
        self.xy.iter_mut().for_each(|sum| *sum *= keep);
        self.add_sample(work, ms, sample_weight(work));
    }

    fn add_sample(&mut self, PrefillWork(x): PrefillWork, ms: f64, weight: f64) {
        for (i, row) in self.xx.iter_mut().enumerate() {
            row.iter_mut()
                .zip(x)
                .for_each(|(sum, term)| *sum += weight * x[i] * term);
            self.xy[i] += weight * x[i] * ms;
        }
    }

    /// The coefficients that fit best, given what to believe where nothing was seen.
    pub fn fit_speed(&self, prior: PrefillSpeed) -> PrefillSpeed {
        // The prior's shape at the observations' scale; one hundredth of an observation holds it
        // where there are none.
        let own = |row: [f64; 4]| dot_product(row, prior.0);
        let hold = 0.01 * prior.0[0].max(1.0).powi(2);
        let scale = (own(self.xy) + hold) / (own(self.xx.map(own)) + hold);
        let scaled = prior.0.map(|value| value * scale);
        let mut all = self.clone();
        let prompts = PRIOR_AT.map(|tokens| PrefillWork::of_prompt(tokens, 0.0));
        let output = PrefillWork::default().with_output(PRIOR_OUTPUT);
        for work in prompts.into_iter().chain([output]) {
            all.add_sample(
                work,
                dot_product(scaled, work.0),
                PRIOR_WEIGHT * sample_weight(work),
            );
        }
        PrefillSpeed(solve_non_negative(all.xx, all.xy).unwrap_or(scaled))
    }
}

fn sample_weight(work: PrefillWork) -> f64 {
    1.0 / (work.0[0] + work.0[1] + 10.0 * work.0[3]).powi(2)
}

fn dot_product(a: [f64; 4], b: [f64; 4]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

/// Solve by elimination; a coefficient that comes out negative is fixed at zero and the rest solved
/// again.
fn solve_non_negative(xx: [[f64; 4]; 4], xy: [f64; 4]) -> Option<[f64; 4]> {
    let mut is_free = [true; 4];
    loop {
        let coefficients = solve_free(xx, xy, is_free)?;
        let least = (0..4).min_by(|&i, &j| coefficients[i].total_cmp(&coefficients[j]))?;
        if coefficients[least] >= 0.0 {
            return Some(coefficients);
        }
        is_free[least] = false;
    }
}

/// Coefficients that are not free are zero. `None` when the equations do not determine the others.
fn solve_free(mut xx: [[f64; 4]; 4], mut xy: [f64; 4], is_free: [bool; 4]) -> Option<[f64; 4]> {
    for column in 0..4 {
        if !is_free[column] {
            xx[column] = [0.0; 4];
            xx.iter_mut().for_each(|row| row[column] = 0.0);
            xx[column][column] = 1.0;
            xy[column] = 0.0;
        }
    }
    for column in 0..4 {
        let pivot = xx[column][column];
        if pivot.abs() < 1e-12 {
            return None;
        }
        for lower in column + 1..4 {
            let factor = xx[lower][column] / pivot;
            let above = xx[column];
            xx[lower]
                .iter_mut()
                .zip(above)
                .for_each(|(value, above)| *value -= factor * above);
            xy[lower] -= factor * xy[column];
        }
    }
    let mut coefficients = [0.0; 4];
    for row in (0..4).rev() {
        let known_terms: f64 = (row + 1..4)
            .map(|column| xx[row][column] * coefficients[column])
            .sum();
        coefficients[row] = (xy[row] - known_terms) / xx[row][row];
    }
    Some(coefficients)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    impl PrefillSpeed {
        fn new(fixed_ms: f64, per_kilotoken_ms: f64, attention_ms: f64) -> Self {
            PrefillSpeed([fixed_ms, per_kilotoken_ms, attention_ms, 1_000.0])
        }
    }

    fn fitted(truth: PrefillSpeed, prompts: &[(f64, f64)]) -> PrefillSpeed {
        let mut fit = SpeedFit::default();
        for &(uncached, cached) in prompts {
            let work = PrefillWork::of_prompt(uncached, cached);
            fit.observe_duration(work, truth.duration_ms(work));
        }
        fit.fit_speed(PrefillSpeed::default())
    }

    proptest! {
        /// Any engine, from a laptop to eight times a recent GPU, is learned to 10 % within fifty
        /// varied prompts.
        #[test]
        fn varied_prompts_teach_the_speed(
            fixed in 0.1f64..50.0, per_kilotoken in 5.0f64..3000.0, attention in 0.0f64..500.0,
        ) {
            let truth = PrefillSpeed::new(fixed, per_kilotoken, attention);
            let prompts: Vec<(f64, f64)> =
                (1..=50).map(|i| (f64::from(i * i) * 10.0, f64::from(i % 5) * 2_000.0)).collect();
            let speed = fitted(truth, &prompts);
            for &(uncached, cached) in &prompts {
                let work = PrefillWork::of_prompt(uncached, cached);
                let learned = speed.duration_ms(work);
                let is = truth.duration_ms(work);
                prop_assert!((learned - is).abs() <= 0.1 * is + 1.0, "{learned} for {is} at {uncached}+{cached}");
            }
        }

        /// Whatever is observed: finite, never negative, never faster for more work.
        #[test]
        fn predictions_stay_sane(seen in proptest::collection::vec((0.0f64..2e5, 0.0f64..2e5, 0.0f64..1e5), 0..40)) {
            let mut fit = SpeedFit::default();
            seen.iter().for_each(|&(u, h, ms)| fit.observe_duration(PrefillWork::of_prompt(u, h), ms));
            let speed = fit.fit_speed(PrefillSpeed::default());
            let mut last = 0.0;
            for tokens in [0.0, 1.0, 100.0, 1e4, 1e6] {
                let ms = speed.duration_ms(PrefillWork::of_prompt(tokens, 0.0));
                prop_assert!(ms.is_finite() && ms >= last, "{ms} after {last}");
                last = ms;
            }
        }
    }

    #[test]
    fn without_observations_the_prior_speaks_and_one_size_scales_it() {
        let near = |a: f64, b: f64| (a - b).abs() <= 0.05 * b;
        let speed = SpeedFit::default().fit_speed(PrefillSpeed::default());
        assert!(
            near(
                speed.duration_ms(PrefillWork::of_prompt(10_000.0, 0.0)),
                1_005.0
            ),
            "{speed:?}"
        );
        // Ten times as fast at one size: believed at that size, and at others too.
        let speed = fitted(PrefillSpeed::new(0.5, 10.0, 0.0), &[(500.0, 0.0); 30]);
        assert!(
            near(speed.duration_ms(PrefillWork::of_prompt(500.0, 0.0)), 5.5),
            "{speed:?}"
        );
        let far = speed.duration_ms(PrefillWork::of_prompt(20_000.0, 0.0));
        assert!((100.0..400.0).contains(&far), "{far}");
    }

    #[test]
    fn worker_is_believed_slow_or_fast_only_for_good_reason_and_not_for_ever() {
        let paced = |ratio: f64, times: usize| {
            let mut pace = ObservedPace::default();
            (0..times).for_each(|_| pace.observe_duration(10.0, 10.0 * ratio, 0.0));
            pace
        };
        assert_eq!(
            ObservedPace::default().worker_speed(PrefillSpeed::default(), 0.0),
            PrefillSpeed::default()
        );
        for ratio in [0.85, 1.0, 1.2] {
            assert_eq!(paced(ratio, 100).slowdown_factor(0.0), 1.0);
        }
        assert!(paced(1_000.0, 1).slowdown_factor(0.0) < 1.8);
        let slow = paced(4.0, 200);
        assert!(
            (2.8..3.2).contains(&slow.slowdown_factor(0.0)),
            "{}",
            slow.slowdown_factor(0.0)
        );
        assert!(slow.slowdown_factor(600_000.0) < 1.001);
        let fast = paced(0.25, 200).slowdown_factor(0.0);
        assert!((0.3..0.45).contains(&fast), "{fast}");
    }

    #[test]
    fn prompts_of_one_step_count_together() {
        // Pairs computed in one step, seen as (everything, nothing): the sum is what tells.
        let truth = PrefillSpeed::new(2.0, 50.0, 0.0);
        let mut fit = SpeedFit::default();
        for i in 1..60 {
            let a = PrefillWork::of_prompt(f64::from(i) * 40.0, 0.0);
            let b = PrefillWork::of_prompt(f64::from(i % 7) * 300.0, 0.0);
            fit.observe_duration(a.plus(b), truth.duration_ms(a) + truth.duration_ms(b));
        }
        let speed = fit.fit_speed(PrefillSpeed::default());
        let ms = speed.duration_ms(PrefillWork::of_prompt(1_000.0, 0.0));
        assert!((ms - 52.0).abs() < 3.0, "{ms}");
    }

    #[test]
    fn engine_that_changes_is_followed() {
        let mut fit = SpeedFit::default();
        for (truth, times) in [
            (PrefillSpeed::new(1.0, 20.0, 0.0), 500),
            (PrefillSpeed::new(1.0, 80.0, 0.0), 500),
        ] {
            for i in 0..times {
                let work = PrefillWork::of_prompt(f64::from(i % 20) * 100.0, 0.0);
                fit.observe_duration(work, truth.duration_ms(work));
            }
        }
        let ms = fit
            .fit_speed(PrefillSpeed::default())
            .duration_ms(PrefillWork::of_prompt(1_000.0, 0.0));
        assert!((70.0..85.0).contains(&ms), "{ms}");
    }
}
