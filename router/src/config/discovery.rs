//! Flags that say where workers are looked for, and the rules between them.

use clap::Args;
use router_core::Role;

#[derive(Debug, Clone, Args)]
#[command(next_help_heading = "Discovery")]
pub struct DiscoveryFlags {
    /// JSON or YAML list of workers (docs/operations.md); read again when it changes
    #[arg(long, value_name = "PATH")]
    pub discovery_file: Option<String>,
    /// Find workers among Kubernetes pods
    #[arg(long)]
    pub service_discovery: bool,
    /// Labels of the pods that are regular workers; all must match
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_delimiter = ',')]
    pub selector: Vec<String>,
    /// Port on which the pods found serve HTTP
    #[arg(long, default_value_t = 80, value_name = "PORT")]
    pub service_discovery_port: u16,
    /// How the pods found are reached; https needs --ca-cert-paths
    #[arg(long, default_value = "http", value_parser = ["http", "https"], hide_possible_values = true, value_name = "http|https")]
    pub service_discovery_scheme: String,
    /// Namespace of the pods; '*' for all, which needs a ClusterRole [default: the router's own]
    #[arg(long, value_name = "NAMESPACE")]
    pub service_discovery_namespace: Option<String>,
    /// Labels of the pods that are prefill workers, with --pd-disaggregation
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_delimiter = ',')]
    pub prefill_selector: Vec<String>,
    /// Labels of the pods that are decode workers, with --pd-disaggregation
    #[arg(long, value_name = "KEY=VALUE", num_args = 1.., value_delimiter = ',')]
    pub decode_selector: Vec<String>,
    /// How to reach Kubernetes from outside [default: KUBECONFIG, ~/.kube/config, the pod's service
    /// account]
    #[arg(long, value_name = "PATH")]
    pub kubeconfig: Option<String>,
}

impl DiscoveryFlags {
    /// Roles whose pods are looked for, each with its label selector as Kubernetes wants it.
    pub fn selectors(&self, is_pd: bool) -> Vec<(Role, String)> {
        if !self.service_discovery {
            return Vec::new();
        }
        let roles = if is_pd {
            vec![
                (Role::Prefill, &self.prefill_selector),
                (Role::Decode, &self.decode_selector),
            ]
        } else {
            vec![(Role::Regular, &self.selector)]
        };
        let joined = roles.into_iter();
        joined
            .map(|(role, labels)| (role, each(labels).collect::<Vec<_>>().join(",")))
            .collect()
    }

    /// True if the pods found speak TLS.
    pub fn is_tls(&self) -> bool {
        self.service_discovery_scheme == "https"
    }

    /// Number of places that are asked for workers.
    pub fn sources(&self, is_pd: bool) -> usize {
        usize::from(self.discovery_file.is_some()) + self.selectors(is_pd).len()
    }

    /// Adds the problems between these flags.
    pub fn validate(&self, is_pd: bool, errors: &mut Vec<String>) {
        let selectors = [
            ("--selector", &self.selector, !is_pd),
            ("--prefill-selector", &self.prefill_selector, is_pd),
            ("--decode-selector", &self.decode_selector, is_pd),
        ];
        for (flag, labels, has_use) in selectors {
            let given = labels.join(" ");
            match (self.service_discovery, has_use) {
                (true, true) if labels.is_empty() => errors.push(format!(
                    "--service-discovery needs {flag} KEY=VALUE; without it every pod would be a \
                     worker"
                )),
                (true, true) => {}
                _ if labels.is_empty() => {}
                (false, _) => errors.push(format!("{flag} {given}: needs --service-discovery")),
                (true, false) if is_pd => errors.push(format!(
                    "{flag} {given}: selects regular workers, --pd-disaggregation has none; use \
                     --prefill-selector and --decode-selector"
                )),
                (true, false) => errors.push(format!("{flag} {given}: needs --pd-disaggregation")),
            }
            for label in each(labels).filter(|label| !is_label(label)) {
                errors.push(format!(
                    "{flag} {label}: give KEY=VALUE with a label's key and value"
                ));
            }
        }
        if self.service_discovery_port == 0 {
            errors.push("--service-discovery-port 0: give a port from 1 to 65535".to_owned());
        }
        for (flag, is_given) in [
            (
                "--service-discovery-namespace",
                self.service_discovery_namespace.is_some(),
            ),
            ("--kubeconfig", self.kubeconfig.is_some()),
            ("--service-discovery-scheme https", self.is_tls()),
        ] {
            if is_given && !self.service_discovery {
                errors.push(format!("{flag} needs --service-discovery"));
            }
        }
        if let Some(name) = &self.service_discovery_namespace
            && name != "*"
            && !is_name(name)
        {
            errors.push(format!(
                "--service-discovery-namespace {name}: give a namespace's name, or '*' for all"
            ));
        }
    }
}

/// Labels may also stand in one argument, with spaces between them.
fn each(labels: &[String]) -> impl Iterator<Item = &str> {
    labels.iter().flat_map(|given| given.split_whitespace())
}

/// Lower case letters, digits and dashes, at most 63 (RFC 1123 label).
fn is_name(name: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_lowercase() || b.is_ascii_digit() || b == b'-';
    (1..=63).contains(&name.len()) && name.bytes().all(is_allowed)
}

fn is_label(label: &str) -> bool {
    let is_allowed = |b: u8| b.is_ascii_alphanumeric() || b"-_./".contains(&b);
    let Some((key, value)) = label.split_once('=') else {
        return false;
    };
    !key.is_empty() && key.bytes().all(is_allowed) && value.bytes().all(is_allowed)
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use crate::config::{ParseStop, RouterConfig};

    fn parse(flags: &str) -> Result<RouterConfig, String> {
        let argv: Vec<String> = format!("baton-router {flags}")
            .split_whitespace()
            .map(str::to_owned)
            .collect();
        RouterConfig::parse(&argv).map_err(|stop| match stop {
            ParseStop::Bad(text) | ParseStop::Help(text) => text,
        })
    }

    #[test]
    fn selectors_of_the_mode_are_joined() {
        let regular = parse("--service-discovery --selector app=x tier=y").unwrap();
        assert_eq!(regular.discovery.selectors(false)[0].1, "app=x,tier=y");
        let pd = parse(
            "--pd-disaggregation --service-discovery --prefill-selector a/b=p --decode-selector \
             a/b=d,c=e",
        );
        let selectors = pd.unwrap().discovery.selectors(true);
        let labels: Vec<&str> = selectors
            .iter()
            .map(|(_, labels)| labels.as_str())
            .collect();
        assert_eq!(labels, ["a/b=p", "a/b=d,c=e"]);
        assert!(parse("").unwrap().discovery.selectors(false).is_empty());
    }

    #[test]
    fn flags_that_cannot_work_are_refused_with_the_remedy() {
        for (flags, part) in [
            (
                "--selector a=b",
                "--selector a=b: needs --service-discovery",
            ),
            ("--service-discovery", "needs --selector KEY=VALUE"),
            (
                "--service-discovery --pd-disaggregation --prefill-selector a=b",
                "needs --decode-selector KEY=VALUE",
            ),
            (
                "--service-discovery --pd-disaggregation --selector a=b",
                "use --prefill-selector and --decode-selector",
            ),
            (
                "--service-discovery --selector a=b --decode-selector a=c",
                "--decode-selector a=c: needs --pd-disaggregation",
            ),
            ("--service-discovery --selector nonsense", "give KEY=VALUE"),
            ("--service-discovery --selector a=b!", "give KEY=VALUE"),
            (
                "--service-discovery --selector a=b --service-discovery-port 0",
                "from 1 to 65535",
            ),
            (
                "--service-discovery --selector a=b --service-discovery-namespace No",
                "give a namespace's name",
            ),
            ("--kubeconfig x", "--kubeconfig needs --service-discovery"),
            (
                "--service-discovery-namespace x",
                "--service-discovery-namespace needs",
            ),
            (
                "--service-discovery-scheme https",
                "--service-discovery-scheme https needs --service-discovery",
            ),
            (
                "--service-discovery --selector a=b --service-discovery-scheme https",
                "--service-discovery-scheme https needs --ca-cert-paths",
            ),
        ] {
            let text = parse(flags).map(|_| "accepted").unwrap_err();
            assert!(text.contains(part), "{flags}: {text}");
        }
    }
}
