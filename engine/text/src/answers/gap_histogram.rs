//! Gaps between the tokens of an answer, counted in buckets.

/// Bucket i counts the gaps in (bounds\[i-1\], bounds\[i\]]; the last bucket has no upper bound.
#[derive(Debug, Clone)]
pub struct GapHistogram {
    bounds: Vec<f64>,
    pub counts: Vec<u64>,
    /// Sum of all gaps [seconds].
    pub sum: f64,
}

impl GapHistogram {
    /// `bounds`: ascending [seconds].
    pub fn new(bounds: Vec<f64>) -> Self {
        Self {
            counts: vec![0; bounds.len() + 1],
            bounds,
            sum: 0.0,
        }
    }

    pub fn observe(&mut self, seconds: f64) {
        let bucket = self.bounds.partition_point(|bound| *bound < seconds);
        self.counts[bucket] += 1;
        self.sum += seconds;
    }
}
