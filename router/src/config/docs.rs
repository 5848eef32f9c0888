//! Texts made from the clap struct: docs/flags.md's router part, --help and --help-all, and the
//! flags that shells complete.

use clap::{Arg, ArgAction, Command, CommandFactory};

use super::RouterConfig;
use super::unsupported_flags::refused_flags;

/// Flags that a first start needs: --help shows these, --help-all all.
pub(super) const ESSENTIALS: [&str; 10] = [
    "host",
    "port",
    "api-key",
    "pd-disaggregation",
    "prefill",
    "decode",
    "worker-urls",
    "policy",
    "model-path",
    "log-level",
];

/// Replaces clap's help flag by one that shows the essential flags, and one that shows all.
pub(super) fn with_help_flags(command: Command) -> Command {
    let is_essential = |arg: &Arg| {
        let long = arg.get_long().unwrap_or_default();
        ESSENTIALS.contains(&long)
    };
    let others = command
        .get_arguments()
        .filter(|arg| !arg.is_hide_set() && !is_essential(arg))
        .count();
    let help = Arg::new("help")
        .short('h')
        .long("help")
        .action(ArgAction::HelpShort)
        .help_heading(None)
        .help("Show the flags used most");
    let help_all = Arg::new("help-all")
        .long("help-all")
        .action(ArgAction::SetTrue)
        .help_heading(None)
        .help("Show all flags");
    command
        .mut_args(|arg| {
            let is_hidden = !is_essential(&arg);
            arg.hide_short_help(is_hidden)
        })
        .arg(help)
        .arg(help_all)
        .after_help(format!("--help-all shows {others} more flags."))
}

/// Help with every flag, a short text for each.
pub(super) fn full_help(command: Command) -> String {
    let shown = command.mut_args(|arg| arg.hide_short_help(false));
    let about_env = RouterConfig::command().get_after_help().cloned();
    let mut shown = match about_env {
        Some(text) => shown.after_help(text),
        None => shown,
    };
    shown.render_help().to_string()
}

/// Flags for shells to complete, a line each: name, its values where they are known (commas
/// between), first sentence of its help; tabs between.
pub fn flags_to_complete() -> String {
    let command = RouterConfig::command_with_env();
    let mut out = String::new();
    for arg in command.get_arguments().filter(|a| !a.is_hide_set()) {
        let Some(long) = arg.get_long() else { continue };
        let takes_value = arg.get_action().takes_values();
        let values: Vec<String> = arg
            .get_possible_values()
            .iter()
            .filter(|_| takes_value)
            .map(|value| value.get_name().to_owned())
            .collect();
        let help = arg.get_help().map(ToString::to_string).unwrap_or_default();
        let sentence = help.split(['\n', ';', ':']).next().unwrap_or_default();
        out += &format!("--{long}\t{}\t{sentence}\n", values.join(","));
    }
    out
}

/// Every flag by group, then the refused ones.
pub fn flags_markdown() -> String {
    let mut out = String::from(
        "## `baton router`\n\n`baton-router --print-flags` prints this section. Of a flag given \
         twice the last counts. Every flag\ncan be set as `BATON_ROUTER_FLAG_<NAME>` in the \
         environment, `--api-key` as `BATON_API_KEY`.\n",
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
    out += "\n### Refused flags, with remedies\n\n| flag | instead |\n|---|---|\n";
    for (names, instead) in refused_flags() {
        let names: Vec<String> = names.iter().map(|n| format!("`--{n}`")).collect();
        out += &format!("| {} | {instead} |\n", names.join(" "));
    }
    out
}
