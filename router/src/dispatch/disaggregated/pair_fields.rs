//! Members that the router adds to a pair's bodies (SGLang's names, docs/protocol.md).

use serde::Serialize;

/// Value of a request, or one for each prompt of a batch.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum PromptValues<T> {
    One(T),
    Batch(Vec<T>),
}

/// Bootstrap parameters: where both workers meet.
#[derive(Debug, Serialize)]
pub struct BootstrapFields {
    bootstrap_host: PromptValues<String>,
    /// `null`: the workers need none.
    bootstrap_port: PromptValues<Option<u16>>,
    bootstrap_room: PromptValues<u64>,
}

impl BootstrapFields {
    /// `rooms`: one for each prompt.
    pub fn new(host: &str, port: Option<u16>, rooms: &[u64], is_batch: bool) -> Self {
        match rooms {
            [room] if !is_batch => Self {
                bootstrap_host: PromptValues::One(host.to_owned()),
                bootstrap_port: PromptValues::One(port),
                bootstrap_room: PromptValues::One(*room),
            },
            _ => Self {
                bootstrap_host: PromptValues::Batch(vec![host.to_owned(); rooms.len()]),
                bootstrap_port: PromptValues::Batch(vec![port; rooms.len()]),
                bootstrap_room: PromptValues::Batch(rooms.to_vec()),
            },
        }
    }
}

/// DP ranks of a worker and its partner. Members that are `None` are absent.
#[derive(Debug, Default, Serialize)]
pub struct RankFields {
    #[serde(skip_serializing_if = "Option::is_none")]
    data_parallel_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    data_parallel_rank_decode: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    routed_dp_rank: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    disagg_prefill_dp_rank: Option<u32>,
}

impl RankFields {
    /// For the prefill worker of a pair.
    pub fn for_prefill(rank: u32) -> Self {
        Self {
            data_parallel_rank: Some(rank),
            routed_dp_rank: Some(rank),
            ..Self::default()
        }
    }

    /// For the decode worker of a pair.
    pub fn for_decode(prefill_rank: u32, decode_rank: u32) -> Self {
        Self {
            data_parallel_rank: Some(prefill_rank),
            data_parallel_rank_decode: Some(decode_rank),
            routed_dp_rank: Some(decode_rank),
            disagg_prefill_dp_rank: Some(prefill_rank),
        }
    }

    /// For a decode worker that computes the prompt itself.
    pub fn for_local_prefill(rank: u32) -> Self {
        Self {
            data_parallel_rank_decode: Some(rank),
            routed_dp_rank: Some(rank),
            ..Self::default()
        }
    }
}

/// Members of one leg's body.
#[derive(Debug, Serialize)]
pub struct LegFields<'a> {
    #[serde(flatten)]
    pub bootstrap: &'a BootstrapFields,
    #[serde(flatten)]
    pub ranks: RankFields,
}

/// JSON members of a struct: its object without the braces.
pub fn to_json_members(fields: &impl Serialize) -> String {
    let object = serde_json::to_string(fields).expect("strings and numbers can be serialized");
    object
        .strip_prefix('{')
        .and_then(|members| members.strip_suffix('}'))
        .expect("a struct is serialized as an object")
        .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn members(bootstrap: &BootstrapFields, ranks: RankFields) -> String {
        to_json_members(&LegFields { bootstrap, ranks })
    }

    #[test]
    fn single_prompt_has_one_value_and_null_where_no_port_is_needed() {
        let bootstrap = BootstrapFields::new("h\"1", None, &[7], false);
        assert_eq!(
            members(&bootstrap, RankFields::default()),
            r#""bootstrap_host":"h\"1","bootstrap_port":null,"bootstrap_room":7"#
        );
    }

    #[test]
    fn batch_has_a_list_even_of_one_prompt() {
        let bootstrap = BootstrapFields::new("h", Some(1), &[7], true);
        assert_eq!(
            members(&bootstrap, RankFields::default()),
            r#""bootstrap_host":["h"],"bootstrap_port":[1],"bootstrap_room":[7]"#
        );
        let bootstrap = BootstrapFields::new("h", None, &[7, 8], true);
        assert_eq!(
            members(&bootstrap, RankFields::default()),
            r#""bootstrap_host":["h","h"],"bootstrap_port":[null,null],"bootstrap_room":[7,8]"#
        );
    }

    #[test]
    fn ranks_follow_the_bootstrap_members() {
        let bootstrap = BootstrapFields::new("h", Some(1), &[7], false);
        let shared = r#""bootstrap_host":"h","bootstrap_port":1,"bootstrap_room":7"#;
        let prefill = r#""data_parallel_rank":2,"routed_dp_rank":2"#;
        assert_eq!(
            members(&bootstrap, RankFields::for_prefill(2)),
            format!("{shared},{prefill}")
        );
        let decode = r#""data_parallel_rank":2,"data_parallel_rank_decode":3,"routed_dp_rank":3,"disagg_prefill_dp_rank":2"#;
        assert_eq!(
            members(&bootstrap, RankFields::for_decode(2, 3)),
            format!("{shared},{decode}")
        );
        assert_eq!(
            to_json_members(&RankFields::for_local_prefill(3)),
            r#""data_parallel_rank_decode":3,"routed_dp_rank":3"#
        );
    }
}
