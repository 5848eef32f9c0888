//! Compare policies on a recorded trace with a model of a fleet (`model.rs`).
//!
//! ```text
//! zcat engine/baton_ops/sim/traces/mooncake_conversation_first30min.jsonl.gz |
//!     cargo run --release -p router-core --example fleet -- --load 0.85
//! ```
//!
//! The trace comes on standard input: JSON Lines in Mooncake's format (timestamp [ms],
//! input_length, output_length [tokens], hash_ids, one per 512 prompt tokens). Arrivals are
//! rescaled so that the work they would be for one cache of the fleet's whole size is `--load` of
//! what the workers can do; equal stamps are spread over the gap to the next.

mod model;

use std::collections::HashMap;
use std::io::Read;

use model::{FleetConfig, RequestArrival, ServedRequest, serve, shared_cache_work_ms};
use rand::SeedableRng;
use rand::rngs::StdRng;
use router_core::{
    CacheAwareParams, CostParams, MissPolicy, PolicyKind, PolicyParams, PromptBlocks, QueueOrder,
    Role, build_policy,
};

const BLOCK_TOKENS: usize = 512;
/// Characters a block stands for, to give cache_aware's limit of characters its meaning.
const BLOCK_CHARS: usize = 4 * BLOCK_TOKENS;

#[derive(serde::Deserialize)]
struct Line {
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

fn main() {
    let flags = Flags::read();
    let mut text = String::new();
    std::io::stdin()
        .read_to_string(&mut text)
        .expect("a trace on standard input");
    let lines: Vec<Line> = text
        .lines()
        .take(flags.number("limit", 1e9) as usize)
        .map(|line| serde_json::from_str(line).expect("a line of a trace"))
        .collect();
    let config = FleetConfig {
        workers: flags.number("workers", 8.0) as usize,
        capacity_tokens: flags.number("capacity-tokens", f64::from(1 << 20)) as u64,
        order: match flags.text("order", "arrival") {
            "arrival" => QueueOrder::Arrival,
            "shortest_first" => QueueOrder::ShortestFirst,
            other => panic!("--order {other}: give arrival or shortest_first"),
        },
        ..FleetConfig::default()
    };
    let mut arrivals = arrivals_of(&lines);
    let span = arrivals.last().map_or(1.0, |last| last.at_ms);
    let work = shared_cache_work_ms(&config, &arrivals) / config.workers as f64;
    println!(
        "{} requests, {} workers of {} tokens, {:?}; an arm's columns: TTFT [s] mean, p50, p95, p99, mean over cost's; hit rate; \
         busiest worker's requests over the mean",
        arrivals.len(),
        config.workers,
        config.capacity_tokens,
        config.order
    );
    for load in flags.text("load", "0.85").split(',') {
        let load: f64 = load.parse().expect("--load: numbers with commas between");
        let scale = work / load / span;
        arrivals
            .iter_mut()
            .for_each(|arrival| arrival.at_ms *= scale);
        compare(&config, &arrivals, load, &flags);
        arrivals
            .iter_mut()
            .for_each(|arrival| arrival.at_ms /= scale);
    }
}

fn compare(config: &FleetConfig, arrivals: &[RequestArrival], load: f64, flags: &Flags) {
    let wanted = flags.text("arms", "");
    println!(
        "\nload {load}\n| policy | mean | p50 | p95 | p99 | mean / cost | p95 / cost | hit rate | \
         max / mean |"
    );
    println!("|---|---|---|---|---|---|---|---|---|");
    let mut base = None;
    for (name, kind, params) in arms(flags) {
        if !wanted.is_empty() && !wanted.split(',').any(|arm| arm == name) {
            continue;
        }
        let policy = build_policy(kind, Role::Prefill, &params);
        let config = FleetConfig {
            is_bound: name == "(one giant cache)",
            ..config.clone()
        };
        let mut rng = StdRng::seed_from_u64(flags.number("seed", 1.0) as u64);
        let served = serve(&*policy, &config, arrivals, &mut rng);
        let row = Row::of(&served, config.workers);
        let (mean, p95) = *base.get_or_insert((row.mean, row.p95));
        println!(
            "| {name} | {:.2} | {:.2} | {:.2} | {:.1} | {:.2} | {:.2} | {:.3} | {:.2} |",
            row.mean,
            row.p50,
            row.p95,
            row.p99,
            row.mean / mean,
            row.p95 / p95,
            row.hits,
            row.spread
        );
    }
}

fn arms(flags: &Flags) -> Vec<(&'static str, PolicyKind, PolicyParams)> {
    let defaults = CostParams::default();
    let cost = CostParams {
        beta_max: flags.number("beta-max", defaults.beta_max),
        hysteresis_ms: flags.number("hysteresis-ms", defaults.hysteresis_ms),
        hysteresis_fraction: flags.number("hysteresis-fraction", defaults.hysteresis_fraction),
        ..defaults
    };
    let with = |cost: CostParams, miss: MissPolicy| PolicyParams {
        cost,
        cache_aware: CacheAwareParams {
            max_tree_size: (1 << 26) / BLOCK_CHARS,
            miss,
            ..CacheAwareParams::default()
        },
        ..PolicyParams::default()
    };
    let usual = with(cost.clone(), MissPolicy::SmallestTree);
    let argmin = CostParams {
        beta_max: 0.0,
        ..cost.clone()
    };
    vec![
        ("cost", PolicyKind::Cost, usual.clone()),
        (
            "cost without beta",
            PolicyKind::Cost,
            with(argmin, MissPolicy::SmallestTree),
        ),
        (
            "cache_aware (smallest_tree)",
            PolicyKind::CacheAware,
            usual.clone(),
        ),
        (
            "cache_aware (least_load)",
            PolicyKind::CacheAware,
            with(cost, MissPolicy::LeastLoad),
        ),
        ("power_of_two", PolicyKind::PowerOfTwo, usual.clone()),
        ("round_robin", PolicyKind::RoundRobin, usual.clone()),
        ("random", PolicyKind::Random, usual.clone()),
        ("(one giant cache)", PolicyKind::Random, usual),
    ]
}

fn arrivals_of(lines: &[Line]) -> Vec<RequestArrival> {
    let mut letters: HashMap<u64, char> = HashMap::new();
    let mut times =
        spread(&lines.iter().map(|line| line.timestamp).collect::<Vec<_>>()).into_iter();
    lines
        .iter()
        .map(|line| RequestArrival {
            at_ms: times.next().unwrap_or_default(),
            blocks: PromptBlocks::of_ids(&line.hash_ids, BLOCK_TOKENS, line.input_length),
            text: line
                .hash_ids
                .iter()
                .map(|id| {
                    let next = letters.len() as u32;
                    // Above the gap of the surrogates there is room for 1 056 768 blocks.
                    *letters.entry(*id).or_insert_with(|| {
                        char::from_u32(0xe000 + next).expect("at most a million blocks")
                    })
                })
                .collect(),
            answer_tokens: line.output_length,
        })
        .collect()
}

/// Equal stamps are spread evenly over the gap to the next.
fn spread(stamps: &[f64]) -> Vec<f64> {
    let mut times = Vec::with_capacity(stamps.len());
    let mut groups = stamps.chunk_by(|a, b| a == b).peekable();
    while let Some(group) = groups.next() {
        let gap = groups.peek().map_or(0.0, |next| next[0] - group[0]);
        let step = gap / group.len() as f64;
        times.extend(
            group
                .iter()
                .zip(0..)
                .map(|(stamp, i)| stamp + step * f64::from(i)),
        );
    }
    times
}

struct Row {
    mean: f64,
    p50: f64,
    p95: f64,
    p99: f64,
    hits: f64,
    spread: f64,
}

impl Row {
    fn of(served: &[ServedRequest], workers: usize) -> Row {
        let mut ttft: Vec<f64> = served.iter().map(|s| s.ttft_ms / 1e3).collect();
        ttft.sort_by(f64::total_cmp);
        let at = |share: f64| ttft[((ttft.len() - 1) as f64 * share) as usize];
        let sum = |of: fn(&ServedRequest) -> f64| served.iter().map(of).sum::<f64>();
        let mut counts = vec![0usize; workers];
        served.iter().for_each(|s| counts[s.worker] += 1);
        let most = counts.into_iter().max().unwrap_or(0);
        Row {
            mean: ttft.iter().sum::<f64>() / ttft.len() as f64,
            p50: at(0.5),
            p95: at(0.95),
            p99: at(0.99),
            hits: sum(|s| s.cached) / sum(|s| s.tokens),
            spread: (most * workers) as f64 / served.len() as f64,
        }
    }
}

/// `--name value` pairs.
struct Flags(HashMap<String, String>);

impl Flags {
    fn read() -> Flags {
        let args: Vec<String> = std::env::args().skip(1).collect();
        let pairs = args.chunks(2).map(|pair| match pair {
            [name, value] if name.starts_with("--") => (name[2..].to_owned(), value.clone()),
            _ => panic!("{pair:?}: give --name value pairs, see the top of examples/fleet/main.rs"),
        });
        Flags(pairs.collect())
    }

    fn text<'a>(&'a self, name: &str, default: &'a str) -> &'a str {
        self.0.get(name).map_or(default, String::as_str)
    }

    fn number(&self, name: &str, default: f64) -> f64 {
        let given = self.0.get(name);
        given.map_or(default, |text| {
            text.parse()
                .unwrap_or_else(|_| panic!("--{name} {text}: not a number"))
        })
    }
}
