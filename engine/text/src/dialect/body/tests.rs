use super::*;

fn spliced(body: &str, fields: &str) -> String {
    let bytes = Bytes::copy_from_slice(body.as_bytes());
    let scan = BodyIndex::of(&bytes, Dialect::Chat).unwrap();
    joined(scan.splice(&bytes, &[], None, fields))
}

fn joined(pieces: impl Iterator<Item = Bytes>) -> String {
    let text: Vec<u8> = pieces.flatten().collect();
    String::from_utf8(text).unwrap()
}

#[test]
fn splice_keeps_every_byte_and_adds_before_the_brace() {
    assert_eq!(spliced("{}", r#""a":1"#), r#"{"a":1}"#);
    assert_eq!(spliced(" {\n} \n", r#""a":1"#), " {\n\"a\":1}");
    assert_eq!(
        spliced(r#"{"t":1e0 ,"x":{"}":[1.50]} } "#, r#""a":1"#),
        r#"{"t":1e0 ,"x":{"}":[1.50]} ,"a":1}"#
    );
    assert_eq!(spliced(r#"{"t":1}"#, ""), r#"{"t":1}"#);
}

#[test]
fn splice_leaves_out_client_fields_wherever_they_stand() {
    let ours = [
        r#""bootstrap_room" : 5"#,
        r#""bootstrap_host":"h""#,
        r#""bootstrap_\u0070ort":[1,{}]"#,
    ];
    // every pattern of kept (k) and ours (o) members up to length 4
    for len in 1..=4usize {
        for mask in 0..(1u32 << len) {
            for (sep, pad) in [(",", ""), (" , ", " ")] {
                let members: Vec<String> = (0..len)
                    .map(|i| {
                        if mask >> i & 1 == 1 {
                            ours[i % ours.len()].to_owned()
                        } else {
                            format!("\"k{i}\":{i}")
                        }
                    })
                    .collect();
                let body = format!("{{{pad}{}{pad}}}", members.join(sep));
                let out = spliced(&body, r#""bootstrap_room":9"#);
                let value: serde_json::Value = serde_json::from_str(&out)
                    .unwrap_or_else(|err| panic!("{body} became {out}: {err}"));
                let kept = len - mask.count_ones() as usize;
                assert_eq!(
                    value.as_object().unwrap().len(),
                    kept + 1,
                    "{body} became {out}"
                );
                assert_eq!(value["bootstrap_room"], 9);
                assert_eq!(out.matches("bootstrap").count(), 1, "{body} became {out}");
            }
        }
    }
}

#[test]
fn token_ids_are_read_where_the_client_sent_them() {
    let read = |api, body: &str| {
        BodyIndex::of(body.as_bytes(), api)
            .unwrap()
            .ids(body.as_bytes())
    };
    for (prompt, ids) in [
        ("[1,22 , 333]", Some(vec![1, 22, 333])),
        ("[ [1,2],\n[3] ]", Some(vec![1, 2, 3])),
        ("\"1,2\"", None),
        ("[\"1,2\",\"3\"]", None),
        ("[1,-2]", None),
        ("[1.0]", None),
        ("[]", None),
    ] {
        assert_eq!(
            read(Dialect::Completions, &format!("{{\"prompt\":{prompt}}}")),
            ids,
            "{prompt}"
        );
        assert_eq!(
            read(Dialect::Generate, &format!("{{\"input_ids\":{prompt}}}")),
            ids,
            "{prompt}"
        );
        // Beside a text they are the same prompt.
        assert_eq!(
            read(
                Dialect::Generate,
                &format!("{{\"text\":\"a\",\"input_ids\":{prompt}}}")
            ),
            ids
        );
        assert_eq!(
            read(
                Dialect::Chat,
                &format!("{{\"messages\":[],\"input_ids\":{prompt}}}")
            ),
            ids
        );
    }
    assert_eq!(read(Dialect::Chat, r#"{"messages":[1,2]}"#), None);
}

#[test]
fn added_members_stand_before_the_fields_and_once() {
    let body = Bytes::from_static(br#"{"a":1, "routed_dp_rank":1}"#);
    let scan = BodyIndex::of(&body, Dialect::Chat).unwrap();
    let added = Bytes::from_static(br#","input_ids":[1,2]"#);
    for (fields, expected) in [
        ("", r#"{"a":1,"input_ids":[1,2]}"#),
        (r#""x":0"#, r#"{"a":1,"input_ids":[1,2],"x":0}"#),
    ] {
        let pieces = scan.splice(&body, &[], Some(&added), fields);
        assert_eq!(joined(pieces), expected);
    }
}

#[test]
fn fields_of_routers_always_go_and_others_where_they_are_replaced() {
    let body = Bytes::from_static(br#"{"routed_dp_rank":1,"stream":true,"deadline_ms":2,"a":3}"#);
    let scan = BodyIndex::of(&body, Dialect::Chat).unwrap();
    let spliced =
        |replaced: &[ManagedField]| joined(scan.splice(&body, replaced, None, r#""x":0"#));
    assert_eq!(
        spliced(&[]),
        r#"{"stream":true,"deadline_ms":2,"a":3,"x":0}"#
    );
    assert_eq!(
        spliced(&[ManagedField::Output]),
        r#"{"deadline_ms":2,"a":3,"x":0}"#
    );
    assert_eq!(
        spliced(&[ManagedField::Output, ManagedField::Deadlines]),
        r#"{"a":3,"x":0}"#
    );
}

#[test]
fn duplicate_fields_are_read_last_and_removed_all() {
    let body = r#"{"stream":true,"bootstrap_room":1,"stream":false,"bootstrap_room":2}"#;
    assert!(
        !BodyIndex::of(body.as_bytes(), Dialect::Chat)
            .unwrap()
            .stream
    );
    assert_eq!(
        spliced(body, r#""bootstrap_room":3"#),
        r#"{"stream":true,"stream":false,"bootstrap_room":3}"#
    );
}

#[test]
fn batches_are_prompts_times_n() {
    let batch = |api, body: &str| BodyIndex::of(body.as_bytes(), api).unwrap().batch;
    assert_eq!(batch(Dialect::Chat, r#"{"messages":[{},{}]}"#), None);
    assert_eq!(batch(Dialect::Chat, r#"{"n":3}"#), Some(3));
    assert_eq!(batch(Dialect::Chat, r#"{"n":null}"#), None);
    assert_eq!(batch(Dialect::Completions, r#"{"prompt":"a"}"#), None);
    assert_eq!(batch(Dialect::Completions, r#"{"prompt":[1,2,3]}"#), None);
    assert_eq!(batch(Dialect::Completions, r#"{"prompt":["a"]}"#), Some(1));
    assert_eq!(
        batch(Dialect::Completions, r#"{"prompt":[ [1],[2]],"n":2}"#),
        Some(4)
    );
    assert_eq!(batch(Dialect::Generate, r#"{"text":["a","b"]}"#), Some(2));
    assert_eq!(batch(Dialect::Generate, r#"{"input_ids":[1,2]}"#), None);
    assert_eq!(
        batch(
            Dialect::Generate,
            r#"{"text":"a","sampling_params":{"n":2}}"#
        ),
        Some(2)
    );
    let err = BodyIndex::of(br#"{"n":99999999999}"#, Dialect::Chat).unwrap_err();
    assert!(matches!(err, BodyError::InvalidValue { param: "n", .. }));
}

#[test]
fn bodies_other_than_json_objects_are_refused() {
    for body in [
        "",
        " ",
        "[]",
        "1",
        "{",
        "{} x",
        r#"{"a":tru}"#,
        r#"{"a":1,}"#,
        "{\"a\":\"\u{1}\"}",
    ] {
        let err = BodyIndex::of(body.as_bytes(), Dialect::Chat).unwrap_err();
        assert!(
            matches!(err, BodyError::InvalidJson { .. }),
            "{body:?}: {err}"
        );
    }
    assert!(BodyIndex::of(b"{\"a\":\"\xff\"}", Dialect::Chat).is_err());
    let deep = format!(r#"{{"a":{}{}}}"#, "[".repeat(300), "]".repeat(300));
    assert!(BodyIndex::of(deep.as_bytes(), Dialect::Chat).is_ok());
}

#[test]
fn logprobs_of_the_prompt_are_recognized_with_the_limit_of_the_answer() {
    use super::PromptLogprobs::{Alone, WithAnswer};
    use Dialect::{Chat, Completions, Generate};
    for (dialect, fields, expected) in [
        (
            Completions,
            r#""echo":true,"logprobs":1,"max_tokens":0"#,
            Some(Alone),
        ),
        (
            Completions,
            r#""echo":true,"logprobs":0,"max_tokens":1"#,
            Some(Alone),
        ),
        (Completions, r#""echo":true,"logprobs":0"#, Some(WithAnswer)),
        (
            Completions,
            r#""echo":true,"logprobs":0,"max_tokens":2"#,
            Some(WithAnswer),
        ),
        (Completions, r#""echo":true,"logprobs":null"#, None),
        (Completions, r#""echo":false,"logprobs":1"#, None),
        (
            Completions,
            r#""prompt_logprobs":0,"max_completion_tokens":1"#,
            Some(Alone),
        ),
        (Chat, r#""prompt_logprobs":3"#, Some(WithAnswer)),
        (Chat, r#""prompt_logprobs":0,"stream":true"#, None),
        (Chat, r#""prompt_logprobs":null"#, None),
        (
            Chat,
            r#""echo":true,"logprobs":true,"top_logprobs":1"#,
            None,
        ),
        (Generate, r#""return_logprob":true"#, None),
        (
            Generate,
            r#""return_logprob":true,"logprob_start_len":-1"#,
            None,
        ),
        (
            Generate,
            r#""return_logprob":false,"logprob_start_len":0"#,
            None,
        ),
        (
            Generate,
            r#""return_logprob":true,"logprob_start_len":0"#,
            Some(WithAnswer),
        ),
        (
            Generate,
            r#""sampling_params":{"max_new_tokens":1},"return_logprob":true,"logprob_start_len":9"#,
            Some(Alone),
        ),
    ] {
        let body = format!("{{{fields}}}");
        let index = BodyIndex::of(body.as_bytes(), dialect).unwrap();
        assert_eq!(index.prompt_logprobs, expected, "{body}");
    }
}

#[test]
fn session_key_is_where_each_api_has_it() {
    let body = br#"{"prompt_cache_key":"a\u0062","metadata":{"user_id":"u","x":1},"user":"c"}"#;
    for (dialect, wanted) in [
        (Dialect::Chat, Some("ab")),
        (Dialect::Completions, Some("ab")),
        (Dialect::Responses, Some("ab")),
        (Dialect::Messages, Some("u")),
        (Dialect::Generate, None),
    ] {
        let scan = BodyIndex::of(body, dialect).unwrap();
        assert_eq!(scan.session_key.as_deref(), wanted, "{dialect:?}");
    }
    let long = "k".repeat(1025);
    for odd in ["1", "null", "\"\"", "[]", &format!("\"{long}\"")] {
        let body = format!(r#"{{"prompt_cache_key":{odd},"metadata":{{"user_id":{odd}}}}}"#);
        for dialect in [Dialect::Chat, Dialect::Messages] {
            let scan = BodyIndex::of(body.as_bytes(), dialect).unwrap();
            assert_eq!(scan.session_key, None, "{odd}");
        }
    }
    let scan = BodyIndex::of(br#"{"metadata":7}"#, Dialect::Messages).unwrap();
    assert_eq!(scan.session_key, None);
}
