"""Facts about a checkpoint before it is loaded, from config.json and the headers of its files. No
torch here.

A start calls `check_checkpoint` first: in milliseconds it finds what would otherwise end the start
minutes later. Every mistake is a ConfigError that names the file and what to do.
"""

from __future__ import annotations

import sys
from array import array
from dataclasses import dataclass
from pathlib import Path

from baton.config import EngineConfig
from baton.errors import ConfigError
from baton.layers.shard import WHOLE, Shard
from baton.layers.spec import DTYPE_BYTES
from baton.models.config_file import read_model_config
from baton.models.head_reader import read_eagle3_head, read_mtp_head
from baton.models.quantized.kv_scales import is_kv_scale
from baton.models.quantized.stored import SourceFinder, StoredSource
from baton.models.spec.model import (
    ModelSpec,
    PlacedParam,
    is_ignorable,
    plan_weights,
    share_of,
    weight_bytes,
)
from baton.models.spec.tensors import Param
from baton.models.spec_reader import find_architecture, read_spec
from baton.models.transformers_backend.choice import choose_impl
from baton.models.weight_files import (
    TensorEntry,
    find_tensor,
    read_tensor_entries,
    refuse_unreadable,
    required_weight_files,
)

CPU_POOL_MIB = 128
"""KV pool of each process on the CPU, whose memory is shared with all of the machine; --kv-pool-mib
says more."""
GIB = 2**30
_SHOWN = 8
_OFTEN_PLAIN = ("embed", "lm_head", "router", "shared_gate", "gates", "conv", "join")
"""Matrices that quantized checkpoints mostly leave plain, without listing them."""

_LOOKED_UP = ("embed", "shared_gate")
"""Matrices that are read by row, or have one row."""

_TAKEN_APART = ("kv_b", "conv")
"""Matrices whose parts are multiplied by each head or channel alone."""


def check_checkpoint(config: EngineConfig, path: Path, nodes: int = 1) -> None:
    """Raise ConfigError when engines with these flags cannot load the model at `path`, or `nodes`
    of them together."""
    if choose_impl(config, path) == "transformers":
        draft = read_draft_spec(config, path, None, on_cpu=True)
        _check_module(config, path, nodes, DraftModelSizes.of(config, draft, path))
        return
    spec = read_spec(
        path,
        config.dtype,
        config.load_format,
        config.random_seed,
        context_length=config.context_length,
        on_cpu=config.device != "cuda",
        quantization=config.quantization,
        kv_cache_dtype=config.kv_cache_dtype,
    )
    if spec.states:
        _check_states(config)
    draft = read_draft_spec(config, path, spec, on_cpu=config.device != "cuda")
    if draft is not None:
        check_draft_vocabulary(config, draft, spec.vocab_size)
    draft_sizes = DraftModelSizes.of(config, draft, path)
    share_of(spec, Shard(0, config.tp_size, divides_experts=config.ep_size > 1))
    weights = weight_bytes(spec)
    if config.load_format != "dummy":
        weights = check_files(spec, path).memory(spec)
    if config.device == "cpu":
        states = sum(state.state_bytes(spec.dtype) for state in spec.states.values())
        # Each drafted token of a row leaves a copy.
        states *= 1 + config.most_drafts
        token_bytes = spec.kv_spec(config.page_size).token_bytes
        _check_memory(config, weights, token_bytes, nodes, draft_sizes, states=states)


def _check_states(config: EngineConfig) -> None:
    """Raise ConfigError for what is not done with states of sequences in this version."""
    model = "the model keeps a state per sequence, which"
    if config.host_kv_gib:
        raise ConfigError(
            f"--host-kv-gib {config.host_kv_gib:g}: {model} is not moved to the host in this "
            "version; leave the flag out"
        )


def read_draft_spec(
    config: EngineConfig, model_dir: Path, target: ModelSpec | None, *, on_cpu: bool
) -> ModelSpec | None:
    """The model or head that drafts; None without one.

    Args:
        target: the model that it drafts for; None for a module of transformers.
        on_cpu: where both are computed.
    Raises ConfigError for a model that cannot draft.
    """
    if config.is_drafted_by_head:
        return _read_head_spec(config, model_dir, target)
    if config.speculative_draft_model_path is None:
        return None
    path = Path(config.speculative_draft_model_path)
    flag = f"--speculative-draft-model-path {path}"
    if find_architecture(read_model_config(path)) is None:
        raise ConfigError(
            f"{flag}: models that transformers' modules compute do not draft in this version; give "
            "one of the families that Baton has blocks for"
        )
    spec = read_spec(path, config.dtype, config.load_format, config.random_seed, on_cpu=on_cpu)
    if spec.states:
        raise ConfigError(
            f"{flag}: the model keeps a state per sequence, and a draft model has pages alone in "
            "this version; give a model whose layers all have attention"
        )
    return spec


def _read_head_spec(config: EngineConfig, model_dir: Path, target: ModelSpec | None) -> ModelSpec:
    if target is None:
        raise ConfigError(
            f"--speculative-algorithm {config.speculative_algorithm}: modules of transformers do "
            "not give their hidden states to a head in this version; use NGRAM or STANDALONE"
        )
    if config.speculative_draft_model_path is None:
        return read_mtp_head(model_dir, target, config.load_format)
    return read_eagle3_head(draft_directory(config, model_dir), target, config.load_format)


def draft_directory(config: EngineConfig, model_dir: Path) -> Path:
    """Where the weights of the model or head that drafts are: its own directory, or that of the
    model, of which it is the last layer."""
    return Path(config.speculative_draft_model_path or model_dir)


def read_draft_tokens(root: Path, draft: ModelSpec, load_format: str) -> array[int]:
    """The token id of each row of a head's output matrix.

    Raises ConfigError where the files name none, or others than the model's.
    """
    assert draft.head is not None, "a model drafts all of its tokens"
    rows = draft.head.draft_vocab_size
    if load_format == "dummy" or rows == draft.vocab_size:
        return array("q", range(rows))
    entry = find_tensor(root, "d2t")
    if entry is None or entry.dtype != "I64" or entry.shape != (rows,):
        found = "none" if entry is None else f"{entry.dtype} {list(entry.shape)}"
        raise ConfigError(
            f"{root}: the head drafts {rows} of {draft.vocab_size} tokens, and d2t (I64 [{rows}]) "
            f"has to say which, but its files have {found}; download them again"
        )
    distances = array("q")
    with refuse_unreadable(entry.file), entry.file.open("rb") as file:
        file.seek(entry.begin)
        distances.frombytes(file.read(entry.end - entry.begin))
    if sys.byteorder == "big":
        distances.byteswap()
    # The files hold how far each token id is from its row.
    tokens = array("q", (row + distance for row, distance in enumerate(distances)))
    if min(tokens) < 0 or max(tokens) >= draft.vocab_size:
        raise ConfigError(
            f"{entry.file}: d2t leads to tokens {min(tokens)} to {max(tokens)}, and the model has "
            f"{draft.vocab_size}; give a head for it"
        )
    return tokens


def check_draft_vocabulary(config: EngineConfig, draft: ModelSpec, vocab_size: int) -> None:
    """Raise ConfigError where a draft model has other token ids than the model."""
    if draft.vocab_size != vocab_size:
        raise ConfigError(
            f"--speculative-draft-model-path {config.speculative_draft_model_path}: the model has "
            f"{draft.vocab_size} token ids, the one it drafts for {vocab_size}; give a model of "
            "the same family and vocabulary"
        )


@dataclass(frozen=True, slots=True)
class DraftModelSizes:
    """Memory that a draft model or head takes in a rank [bytes]."""

    weights: int = 0
    page_bytes: int = 0
    """For each page of the model's KV pool."""
    scratch_bytes: int = 0
    """Of pages for drafts that have no page yet."""

    @staticmethod
    def of(config: EngineConfig, draft: ModelSpec | None, model_dir: Path) -> DraftModelSizes:
        """Checks the files of what drafts on the way, and raises ConfigError."""
        if draft is None:
            return NO_DRAFT_MODEL
        root = draft_directory(config, model_dir)
        weights = weight_bytes(draft)
        if config.load_format != "dummy":
            weights = check_files(draft, root).memory(draft)
        if draft.head is not None:
            read_draft_tokens(root, draft, config.load_format)
        page_bytes = draft.kv_spec(config.page_size).page_bytes
        scratch = config.max_running_requests * draft_scratch_pages(config)
        return DraftModelSizes(weights, page_bytes, scratch * page_bytes)


NO_DRAFT_MODEL = DraftModelSizes()


def draft_scratch_pages(config: EngineConfig) -> int:
    """Pages for the last token of a sequence and all of its drafts but the last, which is not
    computed.
    """
    return -(-config.most_drafts // config.page_size)


def _check_module(config: EngineConfig, path: Path, nodes: int, draft: DraftModelSizes) -> None:
    """The memory of a module's weights, as far as files tell; its class checks them as it loads."""
    if config.load_format == "dummy":
        return
    files = required_weight_files(path)
    entries = [entry for file in files for entry in read_tensor_entries(file).values()]
    stored = sum(entry.end - entry.begin for entry in entries)
    # Only the loaded module tells its heads, so a pool of --max-total-tokens is not counted here.
    _check_memory(config, stored, 0, nodes, draft)


@dataclass(frozen=True, slots=True)
class StoredWeights:
    """A rank's tensors of a checkpoint, and where they are."""

    params: tuple[PlacedParam, ...]
    sources: dict[str, StoredSource]
    """By the unquantized checkpoint's name, for the tensors that the rank reads; those of a file
    are neighbors."""

    def can_stay_quantized(self, param: Param) -> bool:
        """Return whether all of a matrix is quantized, and it is only multiplied."""
        is_multiplied = param.name not in _LOOKED_UP + _TAKEN_APART and not param.is_float32
        return is_multiplied and all(
            self.sources[part.source].form is not None for part in param.parts
        )

    def memory(self, spec: ModelSpec, *, on_cpu: bool = True) -> int:
        """Size of the weights, where kernels multiply quantized matrices as they are."""
        has_kernels = spec.dtype != "float16" or not on_cpu
        total = 0
        for _, param in self.params:
            if has_kernels and self.can_stay_quantized(param):
                for part in param.parts:
                    total += self.sources[part.source].kept_bytes(*part.shape)
            else:
                total += DTYPE_BYTES[spec.dtype_of(param)] * param.size
        return total

    @property
    def quantized(self) -> list[StoredSource]:
        return [source for source in self.sources.values() if source.form is not None]


def check_files(spec: ModelSpec, root: Path, shard: Shard = WHOLE) -> StoredWeights:
    """Find the tensors that a rank reads, once the headers of all files fit the config.

    Raises ConfigError for damaged files, and one that lists what is missing, unexpected or of
    another shape.
    """
    entries: dict[str, TensorEntry] = {}
    for file in required_weight_files(root):
        entries |= read_tensor_entries(file)
    # A quantized matrix has tensors of other names in the same module.
    stored = entries.keys() | {name[: name.rfind(".") + 1] for name in entries}
    params = tuple(plan_weights(spec, shard, stored))
    finder = SourceFinder(entries, spec.quantization, spec.form_on_load)
    sources: dict[str, StoredSource] = {}
    for _, param in params:
        for part in param.parts:
            if part.source not in sources:
                # A tensor of all experts' biases looks like a matrix, too.
                is_optional = param.name in _OFTEN_PLAIN or len(param.shape) < 2
                sources[part.source] = finder.find(
                    part.source,
                    part.whole,
                    is_optional=is_optional,
                    can_convert=param.name not in _TAKEN_APART,
                    is_transposed=part.is_transposed,
                )
    used = {entry.name for source in sources.values() for entry in source.tensors.values()}
    if shard.size > 1:
        for _, param in plan_weights(spec, WHOLE, stored):
            for part in param.parts:
                used |= finder.expected_names(part.source, part.whole)
    problems = finder.problems + [
        f"{entry.file.name}: unexpected tensor {entry.stored_name}"
        for name, entry in entries.items()
        if name not in used
        and not is_ignorable(spec, name)
        and not finder.is_unused(name)
        and not (spec.kv_scales and is_kv_scale(name))
    ]
    if problems:
        shown = problems[:_SHOWN] + (
            [f"… and {len(problems) - _SHOWN} more"] if len(problems) > _SHOWN else []
        )
        raise ConfigError("\n  ".join([f"{root}: the weights do not fit its config.json:", *shown]))
    in_files = sorted(sources.values(), key=lambda source: str(_first_file(source)))
    return StoredWeights(params, {source.name: source for source in in_files})


def _first_file(source: StoredSource) -> Path:
    """Sources are read file by file, because their pages come from the disk."""
    return next(iter(source.tensors.values())).file


def _check_memory(
    config: EngineConfig,
    weights: int,
    token_bytes: int,
    nodes: int,
    draft: DraftModelSizes,
    *,
    states: int = 0,
) -> None:
    """Args: `weights`: bytes of one replica. `token_bytes`: one token's KV. `states`: bytes of those
    that a sequence keeps."""
    weights += draft.weights
    weights *= config.dp_size
    if config.max_total_tokens:
        pages = config.max_total_tokens // config.page_size
        drafts = pages * draft.page_bytes + draft.scratch_bytes
        pools = (config.max_total_tokens * token_bytes + drafts) * config.dp_size
    else:
        pools = (config.kv_pool_mib or CPU_POOL_MIB) * 2**20 * config.dp_size * config.tp_size
    pools += int(config.host_kv_gib * GIB) * config.dp_size * config.tp_size
    pools += states * config.max_running_requests * config.dp_size
    kinds = "KV pools"
    if states:
        kinds += f" and states of {config.max_running_requests} sequences"
        if config.most_drafts:
            kinds += f", with copies for {config.most_drafts} drafts"
    available = available_memory()
    if available is not None and nodes * (weights + pools) > available:
        many = f"{nodes} engines need" if nodes > 1 else "the engine needs"
        raise ConfigError(
            f"{many} {nodes * weights / GIB:.2f} GiB for weights and {nodes * pools / GIB:.2f} GiB for {kinds}, but "
            f"{available / GIB:.2f} GiB of memory are available; use a smaller model, another --dtype, a smaller "
            f"--kv-pool-mib{' or --max-running-requests' if states else ''}, or end other programs"
        )


def available_memory() -> int | None:
    """Bytes this process and its children may still take: the machine's, or less where its cgroup
    says so."""
    limits = []
    for line in _read_lines(Path("/proc/meminfo")):
        if line.startswith("MemAvailable:"):
            limits.append(int(line.split()[1]) * 1024)
    group = Path("/sys/fs/cgroup")
    limit, used = (_read_lines(group / name) for name in ("memory.max", "memory.current"))
    if limit and used and limit[0].isdigit():
        # Cached file pages count as used and are given up when memory is short.
        cached = next(
            (
                int(line.split()[1])
                for line in _read_lines(group / "memory.stat")
                if line.startswith("file ")
            ),
            0,
        )
        limits.append(int(limit[0]) - int(used[0]) + cached)
    return min(limits, default=None)


def _read_lines(file: Path) -> list[str]:
    try:
        return file.read_text().splitlines()
    except OSError:
        return []
