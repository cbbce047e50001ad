//! Figures: quantiles of samples, and bars that hold or do not.

use std::process::ExitCode;
use std::time::Duration;

/// Samples of one kind.
#[derive(Default)]
pub(crate) struct Samples(Vec<f64>);

impl Samples {
    pub(crate) fn push(&mut self, sample: f64) {
        self.0.push(sample);
    }

    pub(crate) fn push_ms(&mut self, sample: Duration) {
        self.push(sample.as_secs_f64() * 1e3);
    }

    pub(crate) fn extend(&mut self, other: Self) {
        self.0.extend(other.0);
    }

    pub(crate) const fn len(&self) -> usize {
        self.0.len()
    }

    /// The smallest sample that `share` of all samples do not exceed.
    pub(crate) fn quantile(&mut self, share: f64) -> f64 {
        self.0.sort_by(f64::total_cmp);
        let rank = (share * self.0.len() as f64).ceil() as usize;
        self.0.get(rank.clamp(1, self.0.len().max(1)) - 1).copied().unwrap_or(f64::NAN)
    }

    pub(crate) fn median(&mut self) -> f64 {
        self.quantile(0.5)
    }
}

/// What was promised of the figures, and whether it holds.
#[derive(Default)]
pub(crate) struct Report {
    short: Vec<String>,
    bars: usize,
}

impl Report {
    /// A figure that has to be at most `bar`.
    pub(crate) fn at_most(&mut self, name: &str, figure: f64, bar: f64, floor: Option<f64>) {
        self.bar(name, figure, "≤", bar, figure <= bar, floor);
    }

    /// A figure that has to be at least `bar`.
    pub(crate) fn at_least(&mut self, name: &str, figure: f64, bar: f64, floor: Option<f64>) {
        self.bar(name, figure, "≥", bar, figure >= bar, floor);
    }

    fn bar(&mut self, name: &str, figure: f64, sign: &str, bar: f64, holds: bool, floor: Option<f64>) {
        let floor = floor.map(|floor| format!("  (floor {floor:.2})")).unwrap_or_default();
        let verdict = if holds { "holds" } else { "SHORT" };
        let line = format!("{name}: {figure:.2}{floor}, bar {sign} {bar}");
        println!("  {verdict}  {line}");
        self.bars += 1;
        if !holds {
            self.short.push(line);
        }
    }

    /// Closes the report; fails when a bar does not hold.
    pub(crate) fn close(self) -> ExitCode {
        println!("\n{} of {} bars hold", self.bars - self.short.len(), self.bars);
        self.short.iter().for_each(|line| println!("short: {line}"));
        if self.short.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
