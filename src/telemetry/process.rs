//! The process itself, under the names that Prometheus clients give: read from `/proc` when somebody asks.
//!
//! A value that cannot be read is left out. Three files and a system call are not worth a dependency.

use std::fs;
use std::time::Duration;

use opentelemetry::metrics::Meter;
use rustix::param::{clock_ticks_per_second, page_size};

use super::table::{Kind, Metric, Unit};

pub(super) const CPU: Metric = Metric {
    name: "process.cpu",
    kind: Kind::Counter,
    unit: Unit::Seconds,
    labels: &[],
    help: "Processor time that the process used, in user and system mode together.",
};
pub(super) const MEMORY: Metric = Metric {
    name: "process.resident_memory",
    kind: Kind::Gauge,
    unit: Unit::Bytes,
    labels: &[],
    help: "Memory of the process that is resident.",
};
pub(super) const FILES: Metric = Metric {
    name: "process.open_fds",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[],
    help: "File descriptors that are open.",
};
pub(super) const MAX_FILES: Metric = Metric {
    name: "process.max_fds",
    kind: Kind::Gauge,
    unit: Unit::Count,
    labels: &[],
    help: "Most file descriptors that may be open.",
};
pub(super) const START: Metric = Metric {
    name: "process.start_time",
    kind: Kind::Gauge,
    unit: Unit::Seconds,
    labels: &[],
    help: "When the process started, in seconds since the Unix epoch.",
};

/// Has the process looked at whenever the metrics are read.
pub(super) fn observe(meter: &Meter) {
    meter
        .f64_observable_counter(CPU.name)
        .with_unit(CPU.unit())
        .with_description(CPU.help)
        .with_callback(|observer| {
            if let Some(stat) = Stat::read() {
                observer.observe(stat.cpu.as_secs_f64(), &[]);
            }
        })
        .build();
    meter
        .f64_observable_gauge(START.name)
        .with_unit(START.unit())
        .with_description(START.help)
        .with_callback(|observer| {
            if let Some(start) = Stat::read().and_then(|stat| Some(boot_time()? + stat.started)) {
                observer.observe(start.as_secs_f64(), &[]);
            }
        })
        .build();
    MEMORY.observed(meter, || Stat::read().map(|stat| stat.resident_bytes));
    FILES.observed(meter, open_files);
    MAX_FILES.observed(meter, max_files);
}

/// What `/proc/self/stat` says (proc_pid_stat(5)).
#[derive(Debug, PartialEq, Eq)]
struct Stat {
    cpu: Duration,
    /// After the start of the system.
    started: Duration,
    resident_bytes: u64,
}

impl Stat {
    fn read() -> Option<Self> {
        Self::parse(&fs::read_to_string("/proc/self/stat").ok()?)
    }

    fn parse(text: &str) -> Option<Self> {
        // The second field is the name of the program, which may hold anything, spaces and brackets too.
        let (_, rest) = text.rsplit_once(") ")?;
        let field = |number: usize| rest.split(' ').nth(number - 3)?.trim().parse::<u64>().ok();
        let ticks = |count: u64| Duration::from_millis(count.saturating_mul(1_000) / clock_ticks_per_second().max(1));
        let page = u64::try_from(page_size()).ok()?;
        Some(Self {
            cpu: ticks(field(14)?.saturating_add(field(15)?)),
            started: ticks(field(22)?),
            resident_bytes: field(24)?.saturating_mul(page),
        })
    }
}

/// When the system started, since the Unix epoch.
fn boot_time() -> Option<Duration> {
    let stat = fs::read_to_string("/proc/stat").ok()?;
    let seconds = stat.lines().find_map(|line| line.strip_prefix("btime "))?;
    seconds.trim().parse().ok().map(Duration::from_secs)
}

fn open_files() -> Option<u64> {
    // One of them is the directory that is being read.
    let count = fs::read_dir("/proc/self/fd").ok()?.count();
    u64::try_from(count).ok()?.checked_sub(1)
}

fn max_files() -> Option<u64> {
    rustix::process::getrlimit(rustix::process::Resource::Nofile).current
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_name_of_the_program_is_passed_over() {
        let fields = "S 1 2 3 4 5 6 7 8 9 10 150 50 13 14 15 16 17 18 300 20 7 22";
        let stat = Stat::parse(&format!("12 (a) b (c) {fields}\n")).unwrap();
        let tick = Duration::from_secs(1) / u32::try_from(clock_ticks_per_second()).unwrap();
        let resident_bytes = 7 * u64::try_from(page_size()).unwrap();
        assert_eq!(stat, Stat { cpu: 200 * tick, started: 300 * tick, resident_bytes });
        assert_eq!(Stat::parse("12 (a) S 1"), None);
    }

    #[test]
    fn this_process_can_be_read() {
        let stat = Stat::read().unwrap();
        assert!(stat.resident_bytes > 0 && boot_time().is_some());
        assert!(open_files().unwrap() >= 3 && max_files().is_none_or(|most| most > 0));
    }
}
