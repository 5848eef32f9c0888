"""A matrix of the model and its tensors in the files. No torch here.

A tensor's form decides how it is read: what has scales or packed words is quantized, what is plain
floats is not. `quantization_config` must agree, because a scale that was lost, or a list that
names the wrong modules, would otherwise be computed as if it were meant.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from baton.models.quantized.forms import (
    PLAIN_TYPES,
    SIGNS,
    UNUSED,
    AwqForm,
    ExpectedTensor,
    GptqForm,
    MatrixForm,
    Mxfp4Form,
    OnLoadForm,
    Shape,
    count_groups,
    tensor_name,
)
from baton.models.quantized.scheme import QuantizationScheme
from baton.models.weight_files import TensorEntry

KEPT_NIBBLE = 4
"""Codes of up to so many bits take half a byte in memory, others a byte."""


@dataclass(frozen=True, slots=True)
class StoredSource:
    """A tensor of the unquantized checkpoint, in the form that the files have."""

    name: str
    """The unquantized checkpoint's."""
    shape: Shape
    """Ours; that of the plain tensor has the last two dimensions in turn if `is_transposed`."""
    form: MatrixForm | None
    """None: a plain tensor."""
    tensors: Mapping[str, TensorEntry]
    """By role of the form; a plain tensor's is `weight`."""
    is_transposed: bool = False
    """Plain numbers are stored as [inputs, outputs]."""

    @property
    def column_groups(self) -> int:
        """Columns of scales that a quantized matrix has."""
        if isinstance(self.form, OnLoadForm):
            return count_groups(self.shape[-1], self.form.group_size)
        scales = self.tensors["scale"].shape
        if isinstance(self.form, AwqForm | GptqForm):
            return scales[0]
        return scales[-1] if len(scales) > 1 else 1

    def kept_bytes(self, rows: int, columns: int) -> int:
        """Size of a share in memory, where kernels take it as it is (`kept`)."""
        assert self.form is not None, "a plain tensor is not quantized"
        codes = rows * columns // (2 if self.form.code_bits <= KEPT_NIBBLE else 1)
        if isinstance(self.form, Mxfp4Form):
            return codes + rows * self.column_groups * 2
        return codes + rows * self.column_groups * 4 * (2 if "zero" in self.tensors else 1)

    @property
    def nbytes(self) -> int:
        """Size in the files."""
        return sum(entry.end - entry.begin for entry in self.tensors.values())


class SourceFinder:
    """Finds the tensors of a checkpoint, and collects what is wrong with them."""

    def __init__(
        self,
        entries: Mapping[str, TensorEntry],
        scheme: QuantizationScheme | None,
        on_load: OnLoadForm | None = None,
    ) -> None:
        """Args: `on_load`: the form that plain matrices get; heads, routers and embeddings stay
        plain."""
        self._entries = entries
        self._scheme = scheme
        self._on_load = on_load
        self.problems: list[str] = []
        self._contradicted: set[str] = set()
        """Modules whose tensors and config.json disagree."""

    def find(
        self,
        name: str,
        shape: Shape,
        *,
        is_optional: bool,
        can_convert: bool = True,
        is_transposed: bool = False,
    ) -> StoredSource:
        """Args:
        name, shape: in an unquantized checkpoint.
        is_optional: the module may be plain although config.json does not exclude it, as heads
        and routers are.
        can_convert: a plain matrix gets the form of `on_load`.
        is_transposed: matrices are [inputs, outputs] in `shape`.
        """
        form = self._find_form(name, shape, is_optional=is_optional)
        if form is self._on_load and not can_convert:
            form = None
        ours = (*shape[:-2], shape[-1], shape[-2]) if is_transposed else shape
        if _module_of(name) in self._contradicted:
            return StoredSource(name, ours, form, {}, is_transposed)
        if form is None or isinstance(form, OnLoadForm):
            expected = {"weight": ExpectedTensor(name, (shape,), PLAIN_TYPES)}
        elif is_transposed and not isinstance(form, Mxfp4Form):
            self._contradict(
                _module_of(name),
                f"{name} is {form}; all experts in one tensor of [inputs, outputs] are read as "
                "plain numbers or MXFP4: use such a checkpoint",
            )
            return StoredSource(name, ours, form, {}, is_transposed)
        else:
            expected = form.expected(name, ours, self._entries)
        found = {}
        for role, tensor in expected.items():
            entry = self._entries.get(tensor.name)
            if entry is None:
                self.problems.append(self._describe_absence(name, tensor, form))
                continue
            found[role] = entry
            self._check(entry, tensor, form)
        return StoredSource(name, ours, form, found, is_transposed)

    def expected_names(self, name: str, shape: Shape) -> set[str]:
        """Names that some rank reads, without any check."""
        form = None if self._scheme is None else self._scheme.form_of(_module_of(name))
        if form is None or not self._is_quantized(name):
            return {name}
        return {tensor.name for tensor in form.expected(name, shape, self._entries).values()}

    def is_unused(self, name: str) -> bool:
        """Tell scales of activations and of the KV cache, which belong to a quantized checkpoint,
        and tensors of modules that are reported already."""
        module, _, role = name.rpartition(".")
        return self._scheme is not None and (role in UNUSED or module in self._contradicted)

    def _is_quantized(self, name: str) -> bool:
        entry = self._entries.get(name)
        has_codes = entry is not None and entry.dtype not in PLAIN_TYPES
        return has_codes or any(tensor_name(name, role) in self._entries for role in SIGNS)

    def _find_form(self, name: str, shape: Shape, *, is_optional: bool) -> MatrixForm | None:
        if len(shape) < 2 or self._scheme is None:
            return None if len(shape) < 2 or is_optional else self._on_load
        module = _module_of(name)
        stated = self._scheme.form_of(module)
        if not self._is_quantized(name):
            # What is absent altogether is reported as such.
            is_plain = name in self._entries
            excluded = self._scheme.find_exclusion(module, loosely=True)
            if is_plain and stated is not None and not is_optional and excluded is None:
                self._contradict(
                    module,
                    f"{name} is plain {self._entries[name].dtype} without a scale, but "
                    f"quantization_config states {stated} for it and excludes it nowhere",
                )
            return None if is_plain or excluded or is_optional else stated
        sign = next(
            (tensor_name(name, role) for role in SIGNS if tensor_name(name, role) in self._entries),
            name,
        )
        if (entry := self._scheme.find_exclusion(module)) is not None:
            self._contradict(module, f"{sign} says that {module} is quantized, but {entry}")
        elif stated is None:
            problem = (
                f"{sign} says that {module} is quantized, but no target of config_groups names it"
            )
            self._contradict(module, problem)
        return stated

    def _contradict(self, module: str, problem: str) -> None:
        self._contradicted.add(module)
        self.problems.append(problem)

    def _describe_absence(self, name: str, tensor: ExpectedTensor, form: MatrixForm | None) -> str:
        if form is None or tensor.name == name:
            return f"missing tensor {tensor.name}"
        return f"missing tensor {tensor.name}, which {form} needs"

    def _check(self, entry: TensorEntry, tensor: ExpectedTensor, form: MatrixForm | None) -> None:
        reason = "config.json implies" if form is None else f"config.json ({form}) implies"
        if entry.shape not in tensor.shapes:
            shapes = " or ".join(str(list(shape)) for shape in tensor.shapes)
            self.problems.append(
                f"{entry.file.name}: {entry.name} is {list(entry.shape)}, {reason} {shapes}"
            )
        elif entry.dtype not in tensor.dtypes:
            types = ", ".join(tensor.dtypes)
            self.problems.append(
                f"{entry.file.name}: {entry.name} is {entry.dtype}, {reason} {types}"
            )


def _module_of(name: str) -> str:
    return name.removesuffix(".weight")
