"""Tree verification as Pallas kernels on the Triton backend.

The algebra of `xla.py` on row blocks of nodes. A block's own triangular factor is inverted by
doubling over levels of the tree, which never forms a power of X: powers grow like binomials and
cancel when keys are alike. What earlier blocks contribute is subtracted before the solve. All
float32 products are sums of 16-bit products, see `splitting.py`.

A tree of one row more than whole blocks has its root taken off: a plain step of the recurrence,
after which the other rows are a forest on the state below the root.
"""

import dataclasses
import functools
import typing

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import MIN_BLOCK, load, padded, span, store
from pallas_kernels.checks import check_power
from pallas_kernels.gdn_tree.scales import FORGET, given
from pallas_kernels.gdn_tree.topology import TreeTopology
from pallas_kernels.splitting import Split, dot, split

MAX_NODES = 256
_MAX_BLOCK = 64


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_v: value columns of one program.
      num_warps: warps of a program that owns value columns.
      prepare_warps: warps of a program of a first launch that makes the triangular factors once
        per value head; 0 makes them in every program, in one launch, for one row block at most.
    """

    block_v: int
    num_warps: int = 4
    prepare_warps: int = 0

    def __post_init__(self):
        check_power("block_v", self.block_v, MIN_BLOCK)


class Tree(typing.NamedTuple):
    """All that the kernels ask of a tree of N rows; one for all layers of a step.

    Attributes:
      depth: int32 [N], as in `TreeTopology`.
      relation: int32 [rows, rows] over the row blocks of `cut(N)`, how node i stands to node j: -1
        if j is not on the path to i, 0 if j is i, else the number of the merge in `_invert` that
        joins the two: shifted to the right by so many bits, their depths agree.
      merges: int32 [1], the largest such number.
    """

    depth: jax.Array
    relation: jax.Array
    merges: jax.Array


class _Inputs(typing.NamedTuple):
    """References to what a launch reads: arguments of `verify`, then the fields of `Tree`."""

    q: typing.Any
    k: typing.Any
    v: typing.Any
    g: typing.Any
    beta: typing.Any
    s0: typing.Any
    q_scale: typing.Any
    k_scale: typing.Any
    depth: typing.Any
    relation: typing.Any
    merges: typing.Any


class Cut(typing.NamedTuple):
    """Row blocks of a tree: `count` blocks of `size` rows after the first `root` (0 or 1) rows.

    Only the first `last` rows of the last block can be nodes.
    """

    root: int
    count: int
    size: int
    last: int

    def rows(self, block: jax.Array | int) -> pl.Slice:
        return span(block, self.size, self.root)


def cut(nodes: int) -> Cut:
    """Returns the row blocks of a tree of this many rows."""
    root = int(nodes % MIN_BLOCK == 1)
    rest = nodes - root
    size = min(padded(rest), _MAX_BLOCK)
    count = pl.cdiv(rest, size)
    return Cut(root, count, size, padded(rest - (count - 1) * size))


def describe(topology: TreeTopology) -> Tree:
    """Returns what the kernels ask of a tree."""
    depth = topology.depth
    rows = cut(depth.shape[0])
    relation = jnp.where(topology.ancestors, _bits(depth[:, None] ^ depth[None, :]), -1)
    relation = relation[rows.root :, rows.root :]
    space = max(rows.count, 1) * rows.size - relation.shape[0]  # no array may be empty
    relation = jnp.pad(relation, (0, space), constant_values=-1)
    return Tree(depth, relation, _bits(jnp.max(depth, keepdims=True)))


def _bits(x: jax.Array) -> jax.Array:
    return 32 - lax.clz(x)


def default_config(nodes: int, value_dim: int) -> Config:
    """Returns the configuration that is fastest for a tree of this size on Hopper."""
    rows = cut(nodes).count * cut(nodes).size
    width = padded(value_dim)
    if rows <= 16:
        return Config(block_v=min(width, 32))
    if rows <= 32:
        return Config(block_v=16, num_warps=2)
    # Small trees leave processors idle anyway: sharing the factors is not worth a launch.
    return Config(block_v=min(width, 32), prepare_warps=4)


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    tree: Tree,
    *,
    q_scale: jax.Array | None = None,
    k_scale: jax.Array | None = None,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(out, u, log_decay)` in float32.

    Shapes as in `gdn_tree_verify`, `tree` from `describe`.
    """
    nodes, value_heads, value_dim = v.shape
    config = config or default_config(nodes, value_dim)
    rows = cut(nodes)
    inputs = _Inputs(q, k, v, g, beta, s0, given(q_scale, q), given(k_scale, k), *tree)
    wide = jax.ShapeDtypeStruct(v.shape, jnp.float32)
    row = jax.ShapeDtypeStruct((nodes, value_heads), jnp.float32)
    columns = pl.cdiv(value_dim, config.block_v)
    call = functools.partial(pl.pallas_call, interpret=interpret)
    if not rows.count or not config.prepare_warps:
        if rows.count > 1:
            raise ValueError(f"one launch takes {_MAX_BLOCK} rows at most, got {nodes}")
        return call(
            functools.partial(_fused_kernel, cut=rows, block_v=config.block_v),
            grid=(value_heads, columns),
            out_shape=(wide, wide, row),
            compiler_params=_compiler_params(config.num_warps),
            name="gdn_tree_verify",
        )(*inputs)

    pairs = rows.count * (rows.count + 1) // 2
    factors = jax.ShapeDtypeStruct((value_heads, pairs, 2, rows.size, rows.size), jnp.float16)
    solve, mix, out, u, log_decay = call(
        functools.partial(_prepare_kernel, cut=rows, block_v=config.block_v),
        grid=(value_heads, pairs + rows.count * columns),
        out_shape=(factors, factors, wide, wide, row),
        compiler_params=_compiler_params(config.prepare_warps),
        name="gdn_tree_prepare",
    )(*inputs)
    out, u = call(
        functools.partial(_solve_kernel, cut=rows, block_v=config.block_v),
        grid=(value_heads, columns),
        out_shape=(wide, wide),
        input_output_aliases={2: 0, 3: 1},
        compiler_params=_compiler_params(config.num_warps),
        name="gdn_tree_solve",
    )(solve, mix, out, u)
    return out, u, log_decay


def _fused_kernel(*refs, cut: Cut, block_v: int):
    *inputs, out_ref, u_ref, log_decay_ref = refs
    refs, results = _Inputs(*inputs), (out_ref, u_ref, log_decay_ref)
    head = pl.program_id(0)
    columns = span(pl.program_id(1), block_v)
    s0, above = _below_root(refs, results, head, columns, cut)
    if not cut.count:
        return
    rows = cut.rows(0)
    relation = load(refs.relation, span(0, cut.size), span(0, cut.size))
    path = _along_path(relation, load(refs.g, rows, head))
    x, y, relation = _factors(refs, head, relation, rows, rows, path, path)
    rhs, out = _read(refs, head, rows, columns, s0, path)
    inverse = _invert(x, relation, refs.merges[0])
    u = rhs + dot(_bounded(inverse), split(rhs, "f16x3"))
    out += dot(_bounded(y), split(u, "f16x3"))
    store(u_ref, u, rows, head, columns)
    store(out_ref, out, rows, head, columns)
    # Every program of a head writes the same numbers here.
    _store_log_decay(refs, log_decay_ref, head, rows, path, above)


def _prepare_kernel(*refs, cut: Cut, block_v: int):
    """Either a pair of row blocks, or what the state gives to a row block: see `_pair`, `_read`."""
    *inputs, solve_ref, mix_ref, out_ref, u_ref, log_decay_ref = refs
    refs, results = _Inputs(*inputs), (out_ref, u_ref, log_decay_ref)
    head, task = pl.program_id(0), pl.program_id(1)
    pairs = mix_ref.shape[1]

    @pl.when(task < pairs)
    def _():
        block, source, pair = _pair(task, cut)
        relation, path = _block_path(refs, head, block, source, cut)
        _, source_path = _block_path(refs, head, source, source, cut)
        rows, columns = cut.rows(block), cut.rows(source)
        x, y, relation = _factors(refs, head, relation, rows, columns, path, source_path)
        x = lax.cond(
            block == source,
            lambda: _invert(x, relation, refs.merges[0]),
            lambda: jnp.where(relation > 0, x, 0.0),
        )
        for ref, value in ((solve_ref, x), (mix_ref, y)):
            for i, term in enumerate(_bounded(value).terms):
                store(ref, term, head, pair, i, span(0, cut.size), span(0, cut.size))

    @pl.when(task >= pairs)
    def _():
        block = lax.rem(task - pairs, cut.count)
        columns = span(lax.div(task - pairs, cut.count), block_v)
        s0, above = _below_root(refs, results, head, columns, cut)
        rows = cut.rows(block)
        _, path = _block_path(refs, head, block, block, cut)
        rhs, out = _read(refs, head, rows, columns, s0, path)
        store(u_ref, rhs, rows, head, columns)
        store(out_ref, out, rows, head, columns)
        _store_log_decay(refs, log_decay_ref, head, rows, path, above)


def _solve_kernel(solve_ref, mix_ref, read_ref, rhs_ref, out_ref, u_ref, *, cut: Cut, block_v: int):
    """From right-hand sides to corrected values, and from what queries read to outputs."""
    head = pl.program_id(0)
    columns = span(pl.program_id(1), block_v)

    def size(block: int) -> int:
        return cut.size if block < cut.count - 1 else cut.last

    def rows(block: int) -> pl.Slice:
        return pl.Slice(block * cut.size + cut.root, size(block))

    def times(ref, block, source):
        pair = block * (block + 1) // 2 + source
        tile = (span(0, size(block)), span(0, size(source)))
        factor = Split(tuple(load(ref, head, pair, i, *tile) for i in range(2)))
        return dot(factor, solved[source])

    solved: list[Split] = []
    for block in range(cut.count):
        rhs = load(rhs_ref, rows(block), head, columns)
        for source in range(block):
            rhs -= times(solve_ref, block, source)
        solved.append(split(rhs, "f16x3"))
        u = rhs + times(solve_ref, block, block)
        solved[block] = split(u, "f16x3")
        store(u_ref, u, rows(block), head, columns)
    for block in range(cut.count):
        out = load(read_ref, rows(block), head, columns)
        for source in range(block + 1):
            out += times(mix_ref, block, source)
        store(out_ref, out, rows(block), head, columns)


def _pair(task: jax.Array, cut: Cut) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The row block, the block of its possible ancestors, and their place among the factors.

    Blocks on the diagonal come first: to invert their factor takes longest.
    """
    other = task - cut.count  # 0: (1, 0), 1: (2, 0), 2: (2, 1), 3: (3, 0), ...
    later = sum((other >= k * (k + 1) // 2).astype(jnp.int32) for k in range(cut.count))
    block = jnp.where(other < 0, task, later)
    source = jnp.where(other < 0, task, other - later * (later - 1) // 2)
    return block, source, block * (block + 1) // 2 + source


def step(state, q, k, v, g, beta) -> tuple[jax.Array, jax.Array, jax.Array]:
    """One node of the recurrence: the state [DK, columns] after it, its output and its u."""
    state = jnp.exp(g) * state
    u = beta * (v - jnp.sum(k[:, None] * state, axis=0))
    state = state + k[:, None] * u[None, :]
    return state, jnp.sum(q[:, None] * state, axis=0), u


def _below_root(refs: _Inputs, results, head, columns, cut: Cut) -> tuple[jax.Array, jax.Array]:
    """The state that the row blocks start from and the log-decay up to there.

    Writes the root's own results if it is not in the blocks.
    """
    keys = _keys(refs)
    s0 = load(refs.s0, head, keys, columns)
    if not cut.root:
        return s0, jnp.float32(0)
    valid = refs.depth[0] >= 0  # if it is padding, its step changes nothing
    key_head = _key_head(refs, head)
    q, k = (
        load(ref, 0, key_head, keys).astype(jnp.float32) * scale[0, key_head]
        for ref, scale in ((refs.q, refs.q_scale), (refs.k, refs.k_scale))
    )
    v = load(refs.v, 0, head, columns).astype(jnp.float32)
    inputs = (q, k, v, _forgetting(refs.g[0, head]), refs.beta[0, head])
    q, k, v, g, beta = (jnp.where(valid, x, 0.0) for x in inputs)
    s0, out, u = step(s0, q, k, v, g, beta)
    for ref, value in zip(results[:2], (out, u), strict=True):
        store(ref, jnp.where(valid, value, 0.0), 0, head, columns)
    results[2][0, head] = g
    return s0, g


class Path(typing.NamedTuple):
    """Sums of g from below the root to each row of a block, [rows] each.

    `coarse` holds multiples of 2^-8 and is exact, `fine` is below one: their difference between
    two nodes keeps the digits that the difference of two long sums would lose. A g under -128
    counts as -128 in both, which forgets all the same; `total` takes it as it is.
    """

    coarse: jax.Array
    fine: jax.Array
    total: jax.Array


def _along_path(relation: jax.Array, g: jax.Array) -> Path:
    bounded = jnp.maximum(g, -128.0)
    coarse = jnp.floor(bounded * 256.0) * (1 / 256)
    parts = (coarse, bounded - coarse, _forgetting(g))
    return Path(*(jnp.sum(jnp.where(relation >= 0, x[None, :], 0.0), axis=1) for x in parts))


def _forgetting(g: jax.Array) -> jax.Array:
    return jnp.maximum(g, FORGET)


def _block_path(refs: _Inputs, head, block, source, cut: Cut) -> tuple[jax.Array, Path]:
    """The relation of a row block to `source`, and its sums over all blocks."""
    rows = span(block, cut.size)

    def relation(source):
        return load(refs.relation, rows, span(source, cut.size))

    def add(source, sums):
        path = _along_path(relation(source), load(refs.g, cut.rows(source), head))
        return Path(*(x + y for x, y in zip(sums, path, strict=True)))

    zeros = Path(*(jnp.zeros((cut.size,), jnp.float32) for _ in range(3)))
    return relation(source), lax.fori_loop(0, block + 1, add, zeros)


def _factors(refs: _Inputs, head, relation, rows, columns, path: Path, source: Path):
    """X, Y and the relation between rows and their possible ancestors, all [rows, columns].

    Where X is no link between strict ancestors, it holds anything, infinity and NaN too.
    """
    key_head = _key_head(refs, head)
    heads = (key_head, _keys(refs))
    right = split(load(refs.k, columns, *heads), "bf16x6")
    x, y = (
        dot(split(load(ref, rows, *heads), "bf16x6"), right, transpose_y=True)
        for ref in (refs.k, refs.q)
    )
    # From here on in the layout of products: vectors are cheap to bring there, matrices are not.
    relation = jnp.where(x == x, relation, -1)
    exponent = jnp.where(relation >= 0, path.coarse[:, None], 0.0) - source.coarse[None, :]
    decay = _exp(exponent + path.fine[:, None] - source.fine[None, :])
    decay *= load(refs.k_scale, columns, key_head)[None, :]
    write = load(refs.beta, rows, head) * load(refs.k_scale, rows, key_head)
    query = load(refs.q_scale, rows, key_head)
    y = jnp.where(relation >= 0, decay * (y * query[:, None]), 0.0)
    return decay * (x * write[:, None]), y, relation


def _invert(x: jax.Array, relation: jax.Array, merges: jax.Array) -> jax.Array:
    """(I + x)^-1 - I for the entries of x that link a row to its strict ancestors.

    Depths are merged in pairs of groups of 1, 2, 4, ..., [[A, 0], [L, B]]^-1 = [[A^-1, 0],
    [-B^-1 L A^-1, B^-1]], so a tree of depth 15 takes four merges. Without the ones of the
    diagonal the largest part of a solution is never rounded to 16-bit terms.
    """

    def merge(number, inverse):
        factor = _bounded(inverse)
        inner = dot(_bounded(jnp.where(relation == number, x, 0.0)), factor)
        return inverse - dot(factor, _bounded(inner))

    first = jnp.where(relation == 0, 1.0, jnp.where(relation == 1, -x, 0.0))
    inverse = lax.fori_loop(2, merges + 1, merge, first)
    return jnp.where(relation == 0, 0.0, inverse)


def _read(
    refs: _Inputs, head, rows, columns, s0: jax.Array, path: Path
) -> tuple[jax.Array, jax.Array]:
    """Right-hand sides beta (v - a K S0) and what queries read, a Q S0; zeros on padding rows."""
    key_head = _key_head(refs, head)
    heads = (key_head, _keys(refs))
    state = split(s0, "bf16x6")
    key_read, query_read = (
        dot(split(load(ref, rows, *heads), "bf16x6"), state) for ref in (refs.k, refs.q)
    )
    decay = _exp(path.coarse + path.fine)
    key_decay, query_decay = (
        (decay * load(scale, rows, key_head))[:, None] for scale in (refs.k_scale, refs.q_scale)
    )
    beta = load(refs.beta, rows, head)[:, None]
    v = load(refs.v, rows, head, columns).astype(jnp.float32)
    valid = (load(refs.depth, rows) >= 0)[:, None]
    rhs = jnp.where(valid, beta * (v - key_decay * key_read), 0.0)
    return rhs, jnp.where(valid, query_decay * query_read, 0.0)


def _store_log_decay(
    refs: _Inputs, log_decay_ref, head, rows, path: Path, above: jax.Array
) -> None:
    valid = load(refs.depth, rows) >= 0
    store(log_decay_ref, jnp.where(valid, path.total + above, 0.0), rows, head)


def _exp(x: jax.Array) -> jax.Array:
    """exp for x <= 0: what a large x loses in the product is lost in a tiny result."""
    return jnp.exp2(x * 1.4426950408889634)


def _bounded(x: jax.Array) -> Split:
    """Terms of a factor. Its entries are products of two unit vectors, scaled: at most one."""
    return split(x, "f16x3", bounded=True)


def _key_head(refs: _Inputs, head: jax.Array) -> jax.Array:
    return lax.div(head, refs.v.shape[1] // refs.k.shape[1])


def _keys(refs: _Inputs) -> pl.Slice:
    return span(0, padded(refs.k.shape[2]))


def _compiler_params(num_warps: int) -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=num_warps, num_stages=1)
