"""Tree verification as Pallas kernels on the Triton backend.

The algebra of `xla.py` on row blocks of nodes. A block's own triangular factor is inverted by
doubling over levels of the tree, which never forms a power of X: powers grow like binomials and
cancel when keys are alike. What earlier blocks contribute is subtracted before the solve. All
float32 products are sums of bfloat16 products, see `splitting.py`.
"""

import dataclasses
import functools
import warnings

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as pltriton

from pallas_kernels.blocks import load, span, store
from pallas_kernels.gdn_tree.topology import TreeTopology
from pallas_kernels.splitting import Scheme, Split, dot, split

MAX_NODES = 256
_MIN_BLOCK = 16  # a shorter contraction on tensor cores is silently wrong

# The notice is about the backend's future, and nothing a caller can act on.
warnings.filterwarnings("ignore", "The Pallas Triton backend is deprecated", DeprecationWarning)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """How the kernel is cut.

    Attributes:
      block_n: nodes in a row block.
      block_v: value columns of one program.
      block_k: key columns taken at a time.
      read: how products with the layer's inputs reach float32's accuracy.
      solve: the same for products among what is made of them.
      num_warps: warps of a program that owns value columns.
      prepare_warps: warps of a program that makes the triangular factors once per value head in
        a launch of its own; 0 makes them in every program, in one launch.
    """

    block_n: int
    block_v: int
    block_k: int
    read: Scheme = "bf16x6"
    solve: Scheme = "f16x3"
    num_warps: int = 4
    prepare_warps: int = 0

    def __post_init__(self):
        for name in ("block_n", "block_v", "block_k"):
            size = getattr(self, name)
            if size < _MIN_BLOCK or size & (size - 1):
                raise ValueError(f"{name} must be a power of two >= {_MIN_BLOCK}, got {size}")


def default_config(nodes: int, key_dim: int, value_dim: int) -> Config:
    """Returns the cut that is fastest for a tree of this size on Hopper."""
    return Config(
        block_n=min(_block(nodes), 64),
        block_v=min(_block(value_dim), 32),
        block_k=min(_block(key_dim), 64),
        # Small trees leave processors idle anyway: sharing the factors is not worth a launch.
        prepare_warps=0 if nodes <= 32 else 4,
    )


def unsupported(nodes: int, platform: str) -> str | None:
    """Returns why the kernel cannot run on this many nodes and this platform, None if it can."""
    if nodes > MAX_NODES:
        return f"at most {MAX_NODES} nodes are supported, got {nodes}"
    if platform == "cpu":
        return None
    if platform not in ("gpu", "cuda"):
        return f"it needs an NVIDIA GPU, got platform {platform!r}"
    capability = str(getattr(jax.local_devices()[0], "compute_capability", "unknown"))
    try:
        enough = float(capability) >= 8.0
    except ValueError:
        enough = False
    return None if enough else f"it needs compute capability 8.0 or above, got {capability}"


def verify(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    g: jax.Array,
    beta: jax.Array,
    s0: jax.Array,
    topology: TreeTopology,
    *,
    config: Config | None = None,
    interpret: bool = False,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Returns `(out, u, log_decay)` in float32. Shapes as in `gdn_tree_verify`."""
    nodes, _, key_dim = k.shape
    _, value_heads, value_dim = v.shape
    if config is None:
        config = default_config(nodes, key_dim, value_dim)
    inputs = (k, q, g, beta, topology.ancestors.astype(jnp.int8), topology.depth)
    row = jax.ShapeDtypeStruct((nodes, value_heads), jnp.float32)
    wide = jax.ShapeDtypeStruct((nodes, value_heads, value_dim), jnp.float32)
    grid = (value_heads, pl.cdiv(value_dim, config.block_v))
    if not config.prepare_warps:
        out, u, log_decay = pl.pallas_call(
            functools.partial(_fused_kernel, config=config),
            grid=grid,
            out_shape=(wide, wide, row),
            compiler_params=_compiler_params(config.num_warps),
            interpret=interpret,
            name="gdn_tree_verify",
        )(*inputs, v, s0)
        return out, u, log_decay

    blocks = pl.cdiv(nodes, config.block_n)
    rows = blocks * config.block_n
    square = jax.ShapeDtypeStruct((value_heads, rows, rows), jnp.float32)
    solve, mix, log_decay = pl.pallas_call(
        functools.partial(_prepare_kernel, config=config),
        grid=(value_heads, blocks),
        out_shape=(square, square, row),
        compiler_params=_compiler_params(config.prepare_warps),
        interpret=interpret,
        name="gdn_tree_prepare",
    )(*inputs)
    out, u = pl.pallas_call(
        functools.partial(_apply_kernel, config=config),
        grid=grid,
        out_shape=(wide, wide),
        compiler_params=_compiler_params(config.num_warps),
        interpret=interpret,
        name="gdn_tree_apply",
    )(k, q, v, beta, s0, topology.depth, solve, mix, log_decay)
    return out, u, log_decay


def _fused_kernel(
    k_ref,
    q_ref,
    g_ref,
    beta_ref,
    ancestors_ref,
    depth_ref,
    v_ref,
    s0_ref,
    out_ref,
    u_ref,
    log_decay_ref,
    *,
    config: Config,
):
    head = pl.program_id(0)
    columns = span(pl.program_id(1), config.block_v)
    tree = (k_ref, q_ref, g_ref, beta_ref, ancestors_ref, depth_ref)
    state = (k_ref, q_ref, s0_ref, depth_ref)
    solved: list[Split] = []
    for block in range(pl.cdiv(v_ref.shape[0], config.block_n)):
        rows = span(block, config.block_n)
        below = jnp.zeros((config.block_n,), jnp.float32)
        x, y_own, below = _factors(tree, head, block, block, below, config)
        inverse = _invert(x, load(depth_ref, rows), config)
        earlier = jnp.zeros((config.block_n, config.block_v), jnp.float32)
        out = jnp.zeros((config.block_n, config.block_v), jnp.float32)
        for source in reversed(range(block)):
            x, y, below = _factors(tree, head, block, source, below, config)
            earlier += _product(x, solved[source], config)
            out += _product(y, solved[source], config)
        key_read, query_read = _read_state(state, head, rows, columns, config)
        decay = jnp.exp(below)[:, None]
        beta = _clean(load(beta_ref, rows, head), load(depth_ref, rows))[:, None]
        v = _clean(load(v_ref, rows, head, columns), load(depth_ref, rows))
        rhs = beta * (v.astype(jnp.float32) - decay * key_read) - earlier
        u = _product(inverse, split(rhs, config.solve), config)
        solved.append(split(u, config.solve))
        out += decay * query_read + _product(y_own, solved[block], config)
        store(u_ref, u, rows, head, columns)
        store(out_ref, out, rows, head, columns)
        # Every program of a head writes the same numbers here.
        store(log_decay_ref, below, rows, head)


def _prepare_kernel(
    k_ref,
    q_ref,
    g_ref,
    beta_ref,
    ancestors_ref,
    depth_ref,
    solve_ref,
    mix_ref,
    log_decay_ref,
    *,
    config: Config,
):
    head, block = pl.program_id(0), pl.program_id(1)
    tree = (k_ref, q_ref, g_ref, beta_ref, ancestors_ref, depth_ref)
    rows = span(block, config.block_n)
    below = jnp.zeros((config.block_n,), jnp.float32)
    x, y, below = _factors(tree, head, block, block, below, config)
    store(mix_ref, y, head, rows, rows)
    store(solve_ref, _invert(x, load(depth_ref, rows), config), head, rows, rows)

    def earlier(distance, below):
        source = block - distance
        x, y, below = _factors(tree, head, block, source, below, config)
        columns = span(source, config.block_n)
        store(solve_ref, x, head, rows, columns)
        store(mix_ref, y, head, rows, columns)
        return below

    below = lax.fori_loop(1, block + 1, earlier, below)
    store(log_decay_ref, below, rows, head)


def _apply_kernel(
    k_ref,
    q_ref,
    v_ref,
    beta_ref,
    s0_ref,
    depth_ref,
    solve_ref,
    mix_ref,
    log_decay_ref,
    out_ref,
    u_ref,
    *,
    config: Config,
):
    head = pl.program_id(0)
    columns = span(pl.program_id(1), config.block_v)
    state = (k_ref, q_ref, s0_ref, depth_ref)
    solved: list[Split] = []
    for block in range(pl.cdiv(v_ref.shape[0], config.block_n)):
        rows = span(block, config.block_n)
        key_read, query_read = _read_state(state, head, rows, columns, config)
        depth = load(depth_ref, rows)
        decay = jnp.exp(load(log_decay_ref, rows, head))[:, None]
        beta = _clean(load(beta_ref, rows, head), depth)[:, None]
        v = _clean(load(v_ref, rows, head, columns), depth)
        rhs = beta * (v.astype(jnp.float32) - decay * key_read)
        out = decay * query_read
        for source in range(block):
            sources = span(source, config.block_n)
            x = load(solve_ref, head, rows, sources)
            y = load(mix_ref, head, rows, sources)
            rhs -= _product(x, solved[source], config)
            out += _product(y, solved[source], config)
        inverse = load(solve_ref, head, rows, rows)
        u = _product(inverse, split(rhs, config.solve), config)
        solved.append(split(u, config.solve))
        out += _product(load(mix_ref, head, rows, rows), solved[block], config)
        store(u_ref, u, rows, head, columns)
        store(out_ref, out, rows, head, columns)


def _factors(tree, head, block, source, below: jax.Array, config: Config):
    """X and Y between a row block and a block of its possible ancestors, both [block_n, block_n].

    `below` [block_n] holds what each row's path sums to in the blocks after `source`; it comes
    back with `source` added. A later row of one path is a deeper node, so the segment from below
    j down to i is what the path holds in the rows after j.
    """
    k_ref, q_ref, g_ref, beta_ref, ancestors_ref, depth_ref = tree
    key_head = head // (g_ref.shape[1] // k_ref.shape[1])
    size = config.block_n
    rows, columns = span(block, size), span(source, size)
    row_depth, column_depth = load(depth_ref, rows), load(depth_ref, columns)

    def gram(chunk, sums):
        keys = span(chunk, config.block_k)
        right = split(_clean(load(k_ref, columns, key_head, keys), column_depth), config.read)
        return tuple(
            total
            + dot(
                split(_clean(load(ref, rows, key_head, keys), row_depth), config.read),
                right,
                transpose_y=True,
            )
            for ref, total in zip((k_ref, q_ref), sums, strict=True)
        )

    zeros = jnp.zeros((size, size), jnp.float32)
    x, y = _over_keys(gram, (zeros, zeros), k_ref.shape[2], config)

    on_path = load(ancestors_ref, rows, columns) != 0
    g = _clean(load(g_ref, columns, head), column_depth)
    along = jnp.where(on_path, g[None, :], 0.0)
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    j = lax.broadcasted_iota(jnp.int32, (size, size), 1)
    after = (i > j).astype(jnp.bfloat16)
    segment = dot(split(along, "bf16x6"), Split((after,))) + below[:, None]
    decay = jnp.where(on_path, jnp.exp(jnp.where(on_path, segment, 0.0)), 0.0)
    beta = _clean(load(beta_ref, rows, head), row_depth)
    strict = (block * size + i) != (source * size + j)
    x = jnp.where(strict, beta[:, None] * decay * x, 0.0)
    return x, decay * y, below + jnp.sum(along, axis=1)


def _invert(x: jax.Array, depth: jax.Array, config: Config) -> jax.Array:
    """(I + x)^-1 for x that links a row to rows of smaller depth only.

    Depths are merged in pairs of groups of 2^stage, [[A, 0], [L, B]]^-1 = [[A^-1, 0],
    [-B^-1 L A^-1, B^-1]], so a tree of depth 15 takes four stages.
    """
    size = depth.shape[0]
    i = lax.broadcasted_iota(jnp.int32, (size, size), 0)
    j = lax.broadcasted_iota(jnp.int32, (size, size), 1)

    def links(stage):
        """The entries of x that join the two groups of a pair."""
        row, column = depth[:, None] >> stage, depth[None, :] >> stage
        return jnp.where(((row & 1) == 1) & (column == row - 1), x, 0.0)

    def merge(stage, inverse):
        # Every entry is a product of a query-like and a key-like unit vector: at most one.
        factor = split(inverse, config.solve, bounded=True)
        inner = dot(split(links(stage), config.solve, bounded=True), factor)
        return inverse - dot(factor, split(inner, config.solve, bounded=True))

    deepest = jnp.max(depth)
    stages = sum((deepest >> stage > 0).astype(jnp.int32) for stage in range(8))
    single = jnp.where(i == j, 1.0, 0.0) - links(0)  # the first merge joins single depths
    return lax.fori_loop(1, stages, merge, single)


def _read_state(refs, head, rows, columns, config: Config):
    """K S0 and Q S0 for a row block and a block of value columns, [block_n, block_v] each."""
    k_ref, q_ref, s0_ref, depth_ref = refs
    key_head = head // (s0_ref.shape[0] // k_ref.shape[1])
    depth = load(depth_ref, rows)

    def read(chunk, sums):
        keys = span(chunk, config.block_k)
        s0 = split(load(s0_ref, head, keys, columns), config.read)
        return tuple(
            total + dot(split(_clean(load(ref, rows, key_head, keys), depth), config.read), s0)
            for ref, total in zip((k_ref, q_ref), sums, strict=True)
        )

    zeros = jnp.zeros((config.block_n, config.block_v), jnp.float32)
    return _over_keys(read, (zeros, zeros), k_ref.shape[2], config)


def _over_keys(body, init, key_dim: int, config: Config):
    """Runs `body(chunk, carry)` over the chunks of the key axis."""
    chunks = pl.cdiv(key_dim, config.block_k)
    # A real loop: unrolled, all chunks would be held in registers at once.
    return body(0, init) if chunks == 1 else lax.fori_loop(0, chunks, body, init)


def _product(x: jax.Array, y: Split, config: Config) -> jax.Array:
    """`x @ y` for a triangular factor `x`, whose entries are at most one."""
    return dot(split(x, config.solve, bounded=True), y)


def _clean(x: jax.Array, depth: jax.Array) -> jax.Array:
    """`x` with zeros on padding rows, whatever those hold."""
    keep = depth >= 0
    keep = keep[:, None] if x.ndim == 2 else keep
    return jnp.where(keep, x, jnp.zeros((), x.dtype))


def _block(size: int) -> int:
    return max(_MIN_BLOCK, pl.next_power_of_2(size))


def _compiler_params(num_warps: int) -> pltriton.CompilerParams:
    return pltriton.CompilerParams(num_warps=num_warps, num_stages=1)
