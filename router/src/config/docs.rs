//! docs/flags.md's router part, made from the clap struct.

use clap::CommandFactory;

use super::RouterConfig;
use super::unsupported_flags::refused_flags;

/// Every flag by group, then the refused ones.
pub fn flags_markdown() -> String {
    let mut out = String::from(
        "## `baton router`\n\n`baton-router --print-flags` prints this section. Of a flag given twice the last counts. Every flag\ncan be set as `BATON_ROUTER_FLAG_<NAME>` in the environment, `--api-key` as `BATON_API_KEY`.\n",
    );
    let command = RouterConfig::command();
    let mut heading = "";
    for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
        let Some(long) = arg.get_long() else { continue };
        let group = arg.get_help_heading().unwrap_or("Other");
        if group != heading {
            heading = group;
            out += &format!("\n### {heading}\n\n| flag | default | meaning |\n|---|---|---|\n");
        }
        let default: Vec<_> = arg
            .get_default_values()
            .iter()
            .map(|v| v.to_string_lossy().into_owned())
            .collect();
        let default = match (arg.get_action(), default.is_empty()) {
            (clap::ArgAction::SetTrue, _) => "off".to_owned(),
            (_, true) => "-".to_owned(),
            _ => format!("`{}`", default.join(" ")),
        };
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let help = help.replace('|', "\\|").replace('\n', " ");
        out += &format!("| `--{long}` | {default} | {help} |\n");
    }
    out += "\n### Refused, with what to do instead\n\n| flag | instead |\n|---|---|\n";
    for (names, instead) in refused_flags() {
        let names: Vec<String> = names.iter().map(|n| format!("`--{n}`")).collect();
        out += &format!("| {} | {instead} |\n", names.join(" "));
    }
    out
}
