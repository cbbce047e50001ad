//! Figures, violations, and the table at the end.

use std::collections::BTreeMap;
use std::process::ExitCode;

use crate::check::{Invariant, Violation};

/// Most violations of an experiment that are printed.
const SHOWN: usize = 20;
/// Most characters of a violation that are printed.
const WIDTH: usize = 1_500;

/// What the experiments gave.
#[derive(Default)]
pub(crate) struct Report {
    rows: Vec<Row>,
}

struct Row {
    experiment: String,
    figures: String,
    violations: usize,
}

impl Report {
    /// Takes the outcome of an experiment. `again` is the command that repeats it.
    pub(crate) fn add(&mut self, experiment: &str, figures: &[(&str, String)], violations: &[Violation], again: &str) {
        let figures: Vec<String> = figures.iter().map(|(name, value)| format!("{name} {value}")).collect();
        let figures = figures.join(" · ");
        println!("{experiment}: {figures}");
        let mut counts: BTreeMap<Invariant, usize> = BTreeMap::new();
        violations.iter().for_each(|violation| *counts.entry(violation.invariant).or_default() += 1);
        if !counts.is_empty() {
            println!("  violations: {counts:?}");
        }
        for violation in violations.iter().take(SHOWN) {
            let text = violation.to_string();
            println!("  VIOLATION {}", text.chars().take(WIDTH).collect::<String>());
        }
        if violations.len() > SHOWN {
            println!("  and {} more", violations.len() - SHOWN);
        }
        if !violations.is_empty() {
            println!("  again: cargo test --features failpoints --test chaos -- {again}");
        }
        self.rows.push(Row { experiment: experiment.to_owned(), figures, violations: violations.len() });
    }

    /// Prints the table; the code says whether everything held.
    pub(crate) fn close(self) -> ExitCode {
        println!("\n{:<34} {:>10}  figures", "experiment", "violations");
        for row in &self.rows {
            println!("{:<34} {:>10}  {}", row.experiment, row.violations, row.figures);
        }
        if self.rows.iter().all(|row| row.violations == 0) { ExitCode::SUCCESS } else { ExitCode::FAILURE }
    }
}
