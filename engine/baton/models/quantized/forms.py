"""How the matrix of one module is stored: its tensors, their shapes and types. No torch here.

A form knows the checkpoint names of its tensors by role: the module's name and the role
(`model.layers.0.mlp.up_proj.weight_scale`), or, for the matrices of all experts in one tensor, that
tensor's name and the role without `weight` (`model.layers.0.mlp.experts.down_proj_scale_inv`).
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

Shape: TypeAlias = "tuple[int, ...]"
FLOAT_TYPES = ("F32", "F16", "BF16")
"""Types of scales, as safetensors spells them."""
PLAIN_TYPES = (*FLOAT_TYPES, "F64")
EXPONENT_TYPES = ("U8", "F8_E8M0")
"""Scales that are powers of two: the exponent plus 127."""
MXFP4_BLOCK = 32
"""Columns that share a scale."""
_WORD_BITS = 32
DEFAULT_BLOCK = (128, 128)
"""Of FP8, where config.json does not state one."""


class ExpectedTensor(NamedTuple):
    """A tensor that a form needs in the files."""

    name: str
    shapes: tuple[Shape, ...]
    """Any of them."""
    dtypes: tuple[str, ...]
    """Any of them."""


Expected: TypeAlias = "dict[str, ExpectedTensor]"
"""By role."""


def tensor_name(source: str, role: str) -> str:
    """Args: `source`: checkpoint name that the matrix would have without quantization."""
    if source.endswith(".weight"):
        return source.removesuffix("weight") + role
    return source + role.removeprefix("weight")


def ceil_div(n: int, size: int) -> int:
    return -(-n // size)


def _count_blocks(n: int, size: int) -> int:
    """Args: `size`: 0 is all."""
    return ceil_div(n, size) if size else 1


def _words(values: int, bits: int) -> int:
    """32-bit words that hold `values` side by side."""
    return ceil_div(values * bits, _WORD_BITS)


@dataclass(frozen=True, slots=True)
class ScaledForm:
    """A number per element, FP8 or int8, and a scale per block of them."""

    code_type: str
    """F8_E4M3 or I8."""
    block: tuple[int, int] | None
    """Rows and columns that share a scale; 0 is all of them. None: the tensor, each row or each
    block of 128 x 128 has one, as the shape of the scales says."""
    scale_roles: tuple[str, ...] = ("weight_scale",)
    """The first of them that is in the files."""
    has_zeros: bool = False
    takes_exponents: bool = False
    """Scales may be stored as exponents."""

    @property
    def code_bits(self) -> int:
        return 8

    def __str__(self) -> str:
        kind = {"F8_E4M3": "FP8", "I8": "int8"}[self.code_type]
        if self.block is None:
            return f"{kind}, a scale per tensor, row or block"
        rows, columns = self.block
        names = {(0, 0): "tensor", (1, 0): "row"}
        scope = names.get(self.block, f"{rows} x {columns} block")
        return f"{kind}, a scale per {scope}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        """Args: `shape`: of the matrix, or of all experts' matrices. `stored`: names in the
        files."""
        names = [tensor_name(source, role) for role in self.scale_roles]
        scales = next((name for name in names if name in stored), names[0])
        types = FLOAT_TYPES + (EXPONENT_TYPES if self.takes_exponents else ())
        shapes = self._scale_shapes(shape)
        tensors = {
            "weight": ExpectedTensor(source, (shape,), (self.code_type,)),
            "scale": ExpectedTensor(scales, shapes, types),
        }
        if self.has_zeros:
            zeros = tensor_name(source, "weight_zero_point")
            tensors["zero"] = ExpectedTensor(zeros, shapes, ("I8",))
        return tensors

    def _scale_shapes(self, shape: Shape) -> tuple[Shape, ...]:
        *experts, rows, columns = shape
        blocks = (self.block,) if self.block else ((0, 0), (1, 0), DEFAULT_BLOCK)
        shapes: list[Shape] = []
        for block in blocks:
            grid = (_count_blocks(rows, block[0]), _count_blocks(columns, block[1]))
            shapes.append((*experts, *grid))
            if experts:
                # The halves gate and up of joint experts may have blocks of their own.
                half_rows = _count_blocks(rows // 2, block[0])
                shapes.append((*experts, 2 * half_rows, grid[1]))
            elif block == (0, 0):
                shapes += [(), (1,)]
            elif block == (1, 0):
                shapes.append((rows,))
        return tuple(dict.fromkeys(shapes))

    def column_block(self, columns: int, grid_columns: int) -> int:
        """Columns that share a scale."""
        return columns if grid_columns == 1 else (self.block or DEFAULT_BLOCK)[1]

    def row_blocks(self, shape: Shape, grid_rows: int) -> tuple[int, int]:
        """Rows that share scales, and rows after which blocks begin anew.

        Args: `grid_rows`: rows of scales that the files have for the matrices of `shape`.
        """
        *experts, rows, _ = shape
        block_rows = (self.block or DEFAULT_BLOCK)[0]
        if grid_rows == 1:
            return rows, rows
        if grid_rows == rows:
            return 1, rows
        if experts and grid_rows == 2 * _count_blocks(rows // 2, block_rows):
            return block_rows or rows // 2, rows // 2
        return block_rows, rows


@dataclass(frozen=True, slots=True)
class PackedForm:
    """compressed-tensors' pack-quantized: integers side by side in words along a row."""

    bits: int
    group_size: int
    """Columns that share a scale; 0 is all of them."""
    has_zeros: bool = False
    is_reordered: bool = False
    """`weight_g_idx` says which group each column belongs to."""

    @property
    def code_bits(self) -> int:
        return self.bits

    def __str__(self) -> str:
        return f"int{self.bits}, {_group_words(self.group_size)}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        rows, columns = shape
        groups = count_groups(columns, self.group_size)
        packed = (rows, _words(columns, self.bits))
        tensors = {
            "weight": ExpectedTensor(tensor_name(source, "weight_packed"), (packed,), ("I32",)),
            "scale": ExpectedTensor(
                tensor_name(source, "weight_scale"), ((rows, groups),), FLOAT_TYPES
            ),
            "shape": ExpectedTensor(tensor_name(source, "weight_shape"), ((2,),), ("I64", "I32")),
        }
        if self.has_zeros:
            zeros = (_words(rows, self.bits), groups)
            name = tensor_name(source, "weight_zero_point")
            tensors["zero"] = ExpectedTensor(name, (zeros,), ("I32",))
        if self.is_reordered:
            name = tensor_name(source, "weight_g_idx")
            tensors["group"] = ExpectedTensor(name, ((columns,),), ("I32", "I64"))
        return tensors


@dataclass(frozen=True, slots=True)
class AwqForm:
    """AWQ's gemm packing: the transposed matrix, 8 columns of it in a word, in an order of its
    own."""

    group_size: int
    bits: int = 4

    @property
    def code_bits(self) -> int:
        return self.bits

    def __str__(self) -> str:
        return f"AWQ int{self.bits}, {_group_words(self.group_size)}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        rows, columns = shape
        groups = count_groups(columns, self.group_size)
        words = _words(rows, self.bits)
        return {
            "weight": ExpectedTensor(tensor_name(source, "qweight"), ((columns, words),), ("I32",)),
            "scale": ExpectedTensor(tensor_name(source, "scales"), ((groups, rows),), FLOAT_TYPES),
            "zero": ExpectedTensor(tensor_name(source, "qzeros"), ((groups, words),), ("I32",)),
        }


@dataclass(frozen=True, slots=True)
class GptqForm:
    """GPTQ's packing: the transposed matrix, its rows side by side in words."""

    bits: int
    group_size: int
    """Rows of the transposed matrix that share a scale; 0 is all of them."""
    zero_offset: int
    """Added to a stored zero, modulo 2 ** bits: 1 in files of version 1."""
    is_reordered: bool = False
    """`g_idx` must say which group each column of the matrix belongs to."""

    @property
    def code_bits(self) -> int:
        return self.bits

    def __str__(self) -> str:
        return f"GPTQ int{self.bits}, {_group_words(self.group_size)}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        rows, columns = shape
        groups = count_groups(columns, self.group_size)
        packed = (_words(columns, self.bits), rows)
        zeros = (groups, _words(rows, self.bits))
        tensors = {
            "weight": ExpectedTensor(tensor_name(source, "qweight"), (packed,), ("I32",)),
            "scale": ExpectedTensor(tensor_name(source, "scales"), ((groups, rows),), FLOAT_TYPES),
            "zero": ExpectedTensor(tensor_name(source, "qzeros"), (zeros,), ("I32",)),
        }
        order = tensor_name(source, "g_idx")
        # Files without reordering mostly have the trivial order, too.
        if self.is_reordered or order in stored:
            tensors["group"] = ExpectedTensor(order, ((columns,),), ("I32", "I64"))
        return tensors


@dataclass(frozen=True, slots=True)
class Mxfp4Form:
    """gpt-oss's packing of all experts: FP4 (e2m1), 32 columns of a row in 16 bytes, and an
    exponent for each of these blocks (OCP Microscaling Formats 1.0, MXFP4)."""

    @property
    def code_bits(self) -> int:
        return 4

    def __str__(self) -> str:
        return f"MXFP4, {_group_words(MXFP4_BLOCK)}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        *experts, rows, columns = shape
        grid = (*experts, rows, count_groups(columns, MXFP4_BLOCK))
        blocks = tensor_name(source, "weight_blocks")
        scales = tensor_name(source, "weight_scales")
        return {
            "weight": ExpectedTensor(blocks, ((*grid, MXFP4_BLOCK // 2),), ("U8",)),
            "scale": ExpectedTensor(scales, (grid,), EXPONENT_TYPES),
        }


@dataclass(frozen=True, slots=True)
class OnLoadForm:
    """Plain numbers that are quantized as they are loaded."""

    bits: int
    group_size: int
    """Columns that share a scale."""

    @property
    def code_bits(self) -> int:
        return self.bits

    def __str__(self) -> str:
        return f"int{self.bits} made at load, {_group_words(self.group_size)}"

    def expected(self, source: str, shape: Shape, stored: Container[str]) -> Expected:
        return {"weight": ExpectedTensor(source, (shape,), PLAIN_TYPES)}


MatrixForm: TypeAlias = ScaledForm | PackedForm | AwqForm | GptqForm | Mxfp4Form | OnLoadForm
ON_LOAD_FORMS = {"int8": OnLoadForm(8, 128), "int4": OnLoadForm(4, 32)}
"""By the values of --quantization."""

SIGNS = ("weight_scale_inv", "weight_scale", "weight_packed", "qweight", "weight_blocks")
"""Roles of tensors that only quantized matrices have."""
UNUSED = (
    "input_scale", "input_zero_point", "activation_scale", "output_scale", "output_zero_point",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_scale",
)  # fmt: skip
"""Roles of tensors that a checkpoint may have for activations, which are not quantized, and for the
KV cache (`kv_scales`)."""


def count_groups(columns: int, group_size: int) -> int:
    """The last group may be smaller."""
    return _count_blocks(columns, group_size)


def _group_words(group_size: int) -> str:
    return f"groups of {group_size}" if group_size else "a scale per row"
