"""Flags to a checked config: defaults, environment, and every mistake reported at once."""

from __future__ import annotations

import dataclasses
import math
import re

import pytest

from baton import config
from baton.config.unsupported_flags import INSTEAD
from baton.errors import ConfigError
from baton.sched.setup import from_config


def test_no_flags_give_the_defaults_of_the_fields() -> None:
    assert config.parse_config([]) == config.EngineConfig()


def test_every_field_is_a_flag_with_help() -> None:
    for f in dataclasses.fields(config.EngineConfig):
        assert f.metadata["help"], f.name
        assert f"`{config.flag_name(f.name)}`" in config.flags_table(config.EngineConfig)


def test_flags_are_typed() -> None:
    c = config.parse_config(
        ["--port", "0", "--kv-lease-secs", "2", "--disable-radix-cache", "--dp-size", "4"]
    )
    assert (c.port, c.kv_lease_secs, c.disable_radix_cache, c.dp_size) == (0, 2.0, True, 4)


def test_environment_is_read_when_the_flag_is_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BATON_API_KEY", "from-environment")
    assert config.parse_config([]).api_key == "from-environment"
    assert config.parse_config(["--api-key", "from-flag"]).api_key == "from-flag"


def test_all_mistakes_are_reported_together() -> None:
    with pytest.raises(ConfigError) as caught:
        config.build_config({"page_size": 256, "dp_size": 0, "port": 70000})
    assert caught.value.message.count("\n") == 2
    assert "--page-size 256: use a power of two" in caught.value.message
    assert "--dp-size 0: give 1 to 64" in caught.value.message
    assert "--port 70000: give 0 to 65535" in caught.value.message


@pytest.mark.parametrize(
    "argv",
    [
        ["--no-such-flag"],
        ["--port", "x"],
        ["--dtype", "int4"],
        ["--page-size", "3"],
        ["--radix-eviction-policy", "slru"],
    ],
)
def test_mistakes_end_the_program_with_2(
    argv: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        config.parse_config(argv)
    assert caught.value.code == 2
    assert argv[0] in capsys.readouterr().err


def test_mistakes_of_every_kind_are_reported_together_a_line_each(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A number that is none, a wrong choice, a flag there is not, the environment, a range, the tenant file."""
    monkeypatch.setenv("IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD", "y")
    argv = [
        "--port",
        "x",
        "--schedule-policy",
        "best",
        "--srpt-agin",
        "-1",
        "stray",
        "--bogus=3",
        "--watermark",
        "2",
    ]
    with pytest.raises(SystemExit) as caught:
        config.parse_config([*argv, "--tenant-config", '{"default": {"max_running": -1}}'])
    assert caught.value.code == 2
    policies = next(
        f for f in dataclasses.fields(config.EngineConfig) if f.name == "schedule_policy"
    ).metadata["choices"]
    shown = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[2] for line in shown[:5]] == [
        "--port x: give an integer",
        f"--schedule-policy best: give one of {', '.join(policies)}",
        "--srpt-agin: there is no such flag; is it --srpt-aging?",
        "'stray' follows no flag; give the model as --model-path stray",
        "--bogus: there is no such flag; --help-all lists them",
    ]
    assert all(line.startswith("baton engine: ") for line in shown)
    rest = "\n".join(shown[5:])
    assert (
        "environment IN_BATCH_PREFIX_CACHING_CHECK_THRESHOLD: --in-batch-prefix-caching-check-threshold y: give"
        in rest
    )
    assert "--watermark 2.0: give 0 to 0.5" in rest
    assert "--tenant-config: default.max_running is -1" in rest
    assert len(shown) == 8


def test_flag_without_its_value_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        config.parse_config(["--port"])
    assert (
        capsys.readouterr().err
        == "baton engine: --port: expected one argument; --help-all lists the flags\n"
    )


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        ({"tp_size": 65}, "--tp-size 65: give 1 to 64"),
        ({"kv_copy_threads": 0}, "--kv-copy-threads 0: give 1 to 32"),
        ({"dist_timeout": 0.0}, "--dist-timeout 0.0: give a number above 0 and at most 86400 [s]"),
        (
            {"tp_size": 2, "dp_size": 2, "disaggregation_mode": "prefill"},
            "--dp-size 2: with --tp-size 2 a prefill node has one DP rank; start more nodes",
        ),
        (
            {"short_first_output_weight": "much"},
            "--short-first-output-weight much: use auto, or a number from 0 to 1",
        ),
        (
            {"short_first_output_weight": "1.5"},
            "--short-first-output-weight 1.5: use auto, or a number from 0 to 1",
        ),
        (
            {"priority_aging_max": -1.0, "priority_aging_rate": 1.0},
            "--priority-aging-max -1.0: give a number at least 0",
        ),
        (
            {"priority_aging_max": 5.0},
            "--priority-aging-max 5.0: needs a --priority-aging-rate above 0",
        ),
        (
            {"srpt_aging_backlog_secs": -1.0},
            "--srpt-aging-backlog-secs -1.0: give a number at least 0",
        ),
        (
            {"queue_timeout_secs": -1.0},
            "--queue-timeout-secs -1.0: give a number at least 0 and below 1e9 [s]",
        ),
        ({"prefill_max_requests": 0}, "--prefill-max-requests 0: give at least 1"),
        ({"context_length": 0}, "--context-length 0: give at least 1"),
        (
            {"kv_lease_secs": math.inf},
            "--kv-lease-secs inf: give a number above 0 and below 1e9 [s]",
        ),
        ({"request_timeout_secs": math.nan}, "--request-timeout-secs nan: give a number above 0"),
        ({"drain_timeout_secs": -1.0}, "--drain-timeout-secs -1.0: give a number at least 0"),
        (
            {"schedule_conservativeness": math.inf},
            "--schedule-conservativeness inf: give a number above 0",
        ),
        (
            {"default_priority": 2**31},
            "--default-priority 2147483648: give -2147483647 to 2147483647",
        ),
    ],
)
def test_rules_of_queue_orders(values: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.build_config(values)
    assert remedy in caught.value.message


def test_queue_order_flags_reach_the_scheduler() -> None:
    argv = [
        "--short-first-output-weight",
        "0.25",
        "--priority-aging-rate",
        "0.5",
        "--priority-aging-max",
        "3",
    ]
    made = from_config.limits(
        config.parse_config([*argv, "--default-priority", "-2", "--enable-priority-scheduling"]), 64
    )
    assert made.policy_params.short_first_output_weight == 0.25
    assert (made.priority.aging_rate, made.priority.aging_max, made.priority.default) == (
        0.5,
        3.0,
        -2,
    )
    plain = from_config.limits(config.build_config({}), 64)
    assert plain.policy_params.short_first_output_weight is None
    assert (plain.priority.aging_max, plain.priority.default) == (math.inf, None)


@pytest.mark.parametrize(
    ("values", "remedy"),
    [
        (
            {"speculative_algorithm": "STANDALONE"},
            "--speculative-algorithm STANDALONE: give --speculative-draft-model-path, too",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_draft_model_path": "d"},
            "--speculative-draft-model-path d: is for --speculative-algorithm STANDALONE or EAGLE3",
        ),
        (
            {"speculative_algorithm": "EAGLE3"},
            "--speculative-algorithm EAGLE3: give --speculative-draft-model-path, too",
        ),
        (
            {"speculative_algorithm": "NEXTN", "speculative_draft_model_path": "d"},
            "--speculative-draft-model-path d: is for --speculative-algorithm STANDALONE or EAGLE3",
        ),
        (
            {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3},
            "--speculative-num-steps 3: is for --speculative-algorithm STANDALONE or EAGLE3",
        ),
        (
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 4},
            "--speculative-eagle-topk 4: drafts are one chain, not a tree; give 1",
        ),
        (
            {"speculative_algorithm": "NEXTN", "tp_size": 2},
            "--speculative-algorithm NEXTN: heads draft with --tp-size 1 in this version",
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "d",
                "speculative_ngram_capacity": 5,
            },
            "--speculative-ngram-capacity 5: is for --speculative-algorithm NGRAM",
        ),
        (
            {"speculative_draft_model_path": "d"},
            "--speculative-draft-model-path d: nothing is drafted without --speculative-algorithm",
        ),
        (
            {
                "speculative_algorithm": "STANDALONE",
                "speculative_draft_model_path": "d",
                "disaggregation_mode": "prefill",
            },
            "--speculative-algorithm STANDALONE: a prefill node decodes nothing; leave it out",
        ),
    ],
)
def test_rules_of_drafts(values: dict[str, object], remedy: str) -> None:
    with pytest.raises(ConfigError) as caught:
        config.build_config(values)
    assert remedy in caught.value.message


def test_steps_of_a_head_bound_its_drafts() -> None:
    flags = {"speculative_algorithm": "NEXTN", "speculative_eagle_topk": 1}
    assert config.build_config(flags).most_drafts == 16
    assert config.build_config({**flags, "speculative_num_steps": 3}).most_drafts == 3


def test_eviction_policy_without_a_cache_is_refused() -> None:
    with pytest.raises(
        ConfigError,
        match="--radix-eviction-policy lfu: nothing is cached with --disable-radix-cache",
    ):
        config.build_config({"radix_eviction_policy": "lfu", "disable_radix_cache": True})
    assert (
        config.parse_config(["--radix-eviction-policy", "priority"]).radix_eviction_policy
        == "priority"
    )


def test_abbreviations_are_no_flags() -> None:
    with pytest.raises(SystemExit):
        config.parse_config(["--disagg", "prefill"])


def test_gpu_has_larger_steps_unless_their_size_is_given() -> None:
    cuda = config.build_config({"device": "cuda"})
    assert (cuda.max_running_requests, cuda.chunked_prefill_size) == (256, 8192)
    assert (
        config.build_config({"device": "cuda", "chunked_prefill_size": 512}).chunked_prefill_size
        == 512
    )
    for device in ("cpu", "auto"):
        other = config.build_config({"device": device})
        assert (other.max_running_requests, other.chunked_prefill_size) == (64, 512)


def test_flashinfer_on_the_cpu_is_refused_before_anything_is_loaded() -> None:
    with pytest.raises(
        ConfigError, match="--attention-backend flashinfer: needs a CUDA device, --device is cpu"
    ):
        config.build_config({"attention_backend": "flashinfer"})


def test_share_of_a_gpus_memory_is_for_gpus() -> None:
    for wrong in (0, 1, -0.5, 1.2):
        with pytest.raises(
            ConfigError, match=r"--mem-fraction-static .* give a number above 0 and below 1"
        ):
            config.build_config({"mem_fraction_static": wrong, "device": "cuda"})
    with pytest.raises(ConfigError, match="--device is cpu; use --kv-pool-mib"):
        config.build_config({"mem_fraction_static": 0.5})
    assert config.build_config({"mem_fraction_static": 0.5, "device": "auto"}).kv_pool_mib is None
    with pytest.raises(ConfigError, match="--kv-pool-mib 0: give at least 1"):
        config.build_config({"kv_pool_mib": 0})


def test_flag_names_of_sglang_and_vllm_are_aliases_or_say_what_to_use(
    capsys: pytest.CaptureFixture[str],
) -> None:
    line = (
        "--model demo --tp 2 --max-model-len 512 --max-num-seqs 8 --block-size 32 --enforce-eager"
    )
    c = config.parse_config(line.split())
    assert (c.tp_size, c.context_length, c.max_running_requests, c.page_size) == (2, 512, 8, 32)
    assert c.disable_cuda_graph
    with pytest.raises(SystemExit):
        config.parse_config(
            ["--dp", "2", "--enable-lora", "--trust-remote-code", "--base-gpu-id", "1"]
        )
    said = capsys.readouterr().err.splitlines()
    assert [text.split(": ")[1] for text in said] == [
        "--enable-lora",
        "--trust-remote-code",
        "--base-gpu-id",
    ]
    assert "CUDA_VISIBLE_DEVICES" in said[2]


def test_tls_flags_of_sglang_and_vllm_say_where_tls_ends(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with pytest.raises(SystemExit):
        config.parse_config(["--ssl-certfile", "c.pem", "--ssl-keyfile", "k.pem"])
    said = capsys.readouterr().err.splitlines()
    assert [text.split(": ")[1] for text in said] == ["--ssl-certfile", "--ssl-keyfile"]
    assert all("engines speak HTTP" in text and "--tls-cert-path" in text for text in said)


def test_no_refused_flag_name_exists_and_every_flag_named_instead_does() -> None:
    parser = config.FlagParser("x", "")
    config.add_flags(parser, config.EngineConfig)
    known = set(parser._option_string_actions)
    assert not known & INSTEAD.keys()
    of_others = {"--prefill", "--decode", "--revision", "--local-dir"}
    of_others |= {"--tls-cert-path", "--tls-key-path"}
    assert (
        set(re.findall(r"--[a-z][a-z-]+", " ".join(INSTEAD.values()))) - known - of_others == set()
    )


def test_host_names_are_those_of_both_flags() -> None:
    made = config.parse_config(["--host", "GPU1", "--allowed-hosts", " gpu1.lan, Gpu2 ,"])
    assert made.host_names == {"gpu1", "gpu1.lan", "gpu2"}
