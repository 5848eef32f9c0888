//! Prometheus pages of several workers as one: the format wants each family once, with its lines
//! together.

use std::collections::BTreeMap;
use std::fmt::Write;

#[derive(Default)]
struct Family<'a> {
    /// # HELP and # TYPE, of the first page that has it.
    about: Vec<&'a str>,
    lines: String,
}

/// `pages`: (worker, text). Each sample gets the label `worker`; one that has it already keeps its
/// own as `exported_worker`, as in Prometheus.
pub fn merge<'a>(pages: impl Iterator<Item = (&'a str, &'a str)>) -> String {
    let mut families: BTreeMap<&str, Family<'a>> = BTreeMap::new();
    for (worker, text) in pages {
        let mut family = "";
        let worker = worker.replace('\\', "\\\\").replace('"', "\\\"");
        for line in text.lines() {
            if let Some(about) = line.strip_prefix('#') {
                let mut words = about.split_whitespace();
                if let (Some("HELP" | "TYPE"), Some(name)) = (words.next(), words.next()) {
                    family = name;
                    let about = &mut families.entry(name).or_default().about;
                    let kind = &line[..line.len().min(6)];
                    if !about.iter().any(|known| known.starts_with(kind)) {
                        about.push(line);
                    }
                }
            } else if let Some((name, rest)) = sample(line) {
                // Lines of a histogram end in _bucket, _sum, _count; one without a TYPE line is its
                // own family.
                let owner = if !family.is_empty() && name.starts_with(family) {
                    family
                } else {
                    name
                };
                let lines = &mut families.entry(owner).or_default().lines;
                let written = match rest.strip_prefix('{') {
                    Some(labels) => {
                        let labels = rename(labels);
                        writeln!(lines, "{name}{{worker=\"{worker}\",{labels}")
                    }
                    None => writeln!(lines, "{name}{{worker=\"{worker}\"}}{rest}"),
                };
                written.expect("writing to a String cannot fail");
            }
        }
    }
    let mut out = String::new();
    for family in families
        .into_values()
        .filter(|family| !family.lines.is_empty())
    {
        for about in family.about {
            out.push_str(about);
            out.push('\n');
        }
        out.push_str(&family.lines);
    }
    out
}

/// Name of a sample, and the rest of its line.
fn sample(line: &str) -> Option<(&str, &str)> {
    let end = line.find(['{', ' ', '\t'])?;
    (end > 0).then(|| line.split_at(end))
}

/// A label `worker` at the beginning or behind a comma becomes `exported_worker`. Values may hold
/// anything, but a quote in one is escaped, so `,worker="` is no part of a value.
fn rename(labels: &str) -> String {
    let renamed = labels.replace(",worker=\"", ",exported_worker=\"");
    match renamed.strip_prefix("worker=\"") {
        Some(rest) => format!("exported_worker=\"{rest}"),
        None => renamed,
    }
}

#[cfg(test)]
mod tests {
    use super::merge;

    #[test]
    fn families_are_joined_and_samples_labeled() {
        let a = "# HELP x_total things\n# TYPE x_total counter\nx_total 1\n# TYPE h histogram\nh_bucket{le=\"1\"} 2\nh_sum 3\n";
        let b =
            "# HELP x_total things\n# TYPE x_total counter\nx_total{worker=\"in\",k=\"v\"} 5 17\n";
        let merged = merge([("http://a", a), ("http://b", b)].into_iter());
        assert_eq!(
            merged,
            "# TYPE h histogram\nh_bucket{worker=\"http://a\",le=\"1\"} 2\nh_sum{worker=\"http://a\"} 3\n\
             # HELP x_total things\n# TYPE x_total counter\nx_total{worker=\"http://a\"} 1\n\
             x_total{worker=\"http://b\",exported_worker=\"in\",k=\"v\"} 5 17\n"
        );
        assert_eq!(merge([("a", "garbage"), ("b", "")].into_iter()), "");
    }
}
