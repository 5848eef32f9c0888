//! docs/flags.md and docs/metrics.md hold exactly what the program prints.

use std::path::Path;

/// The section of `page` that begins like `wanted`, up to the next heading of its level.
fn section(page: &str, wanted: &str) -> String {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../docs")
        .join(page);
    let text = std::fs::read_to_string(&path).unwrap();
    let heading = wanted.lines().next().unwrap();
    let start = text
        .find(&format!("\n{heading}\n"))
        .unwrap_or_else(|| panic!("{page} has no '{heading}'"))
        + 1;
    let rest = &text[start..];
    let end = rest[1..].find("\n## ").map_or(rest.len(), |at| at + 2);
    rest[..end].trim_end().to_owned()
}

#[test]
fn flags_page_is_what_print_flags_prints() {
    let wanted = baton_router::flags_markdown();
    assert_eq!(section("flags.md", &wanted), wanted.trim_end());
}

#[test]
fn metrics_page_is_what_print_metrics_prints() {
    let wanted = baton_router::metrics_markdown();
    assert_eq!(section("metrics.md", &wanted), wanted.trim_end());
}
