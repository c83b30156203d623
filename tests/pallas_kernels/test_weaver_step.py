"""Growth under Weaver: every implementation against float64, the kernels one by one, refusals."""

import dataclasses
import functools
import types
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hopper import lower_for_hopper

from pallas_kernels import choice
from pallas_kernels.weaver_step import (
    Block,
    Norm,
    Projection,
    Rotation,
    Weights,
    growth_rows,
    reference,
    weaver_grow,
    xla,
)
from pallas_kernels.weaver_step import pallas as kernels
from pallas_kernels.weaver_step.attend import attend
from pallas_kernels.weaver_step.frontier import offer, take
from pallas_kernels.weaver_step.launch import Config
from pallas_kernels.weaver_step.project import project
from pallas_kernels.weaver_step.score import score
from pallas_kernels.weaver_step.specs import REAL, SMALL, Spec, make_inputs, path_error
from pallas_kernels.weaver_step.state import Growth, Nodes, plant
from tfm_jax.config import TreeConfig, WeaverConfig
from tfm_jax.decoding.draft import Draft
from tfm_jax.decoding.grow import grow, slots, weaver_scorer
from tfm_jax.models.weaver import Weaver

HOW = {"config": Config(), "interpret": True}
BARE = (Block(*(Projection(jnp.zeros(s)) for s in ((96, 32), (32, 32), (24, 32), (32, 24)))),)
INTERPRETED = [spec for spec in SMALL if spec.name == "rotary"]  # they take long to compile


def assert_same_tree(tree, expected, tolerance: float = 2e-6) -> None:
    for name in ("token", "parent", "depth", "rank", "valid"):
        np.testing.assert_array_equal(getattr(tree, name), getattr(expected, name), name)
    for name in ("score", "logprob"):
        np.testing.assert_allclose(getattr(tree, name), getattr(expected, name), tolerance, 1e-6)


@pytest.mark.parametrize(
    ("implementation", "spec"),
    [*(("xla", spec) for spec in SMALL[1:]), *(("pallas", spec) for spec in INTERPRETED)],
    ids=lambda x: x if isinstance(x, str) else x.name,
)
def test_growth_is_best_first(implementation, spec):
    inputs = make_inputs(spec)
    expected = weaver_grow(*inputs, **spec.options, implementation="reference")
    tree = weaver_grow(*inputs, **spec.options, implementation=implementation)
    assert_same_tree(tree, expected)


def test_growth_within_a_program():
    spec = SMALL[0]
    inputs = make_inputs(spec)
    grow = functools.partial(weaver_grow, **spec.options)
    assert_same_tree(jax.jit(grow)(*inputs), grow(*inputs))


def test_a_loop_of_rounds_grows_what_written_out_rounds_do(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")  # a CPU always takes the loop
    spec = next(spec for spec in SMALL if spec.name == "one_at_a_time")
    inputs = make_inputs(spec)
    expected = weaver_grow(*inputs, **spec.options, implementation="reference")
    between = spec.budget - 1  # rounds that take nodes and expand them
    for most, loops in ((between, 0), (between - 1, 1)):
        monkeypatch.setattr("pallas_kernels.weaver_step.grow._WRITTEN_OUT", most)
        call = functools.partial(weaver_grow, **spec.options, implementation="xla")
        lowered = jax.jit(call).lower(*inputs)
        assert lowered.as_text().count("stablehlo.while") == loops
        assert_same_tree(lowered.compile()(*inputs), expected)


def test_bfloat16_follows_its_own_paths():
    spec = SMALL[0]
    inputs = make_inputs(spec, dtype=jnp.bfloat16)
    tree = weaver_grow(*inputs, **spec.options)
    assert path_error(inputs, tree, spec.activation) < 0.05


def test_cases_are_what_they_claim():
    """The dry tree runs out of offers, and ties are ties."""
    trees = {
        spec.name: weaver_grow(*make_inputs(spec), **spec.options, implementation="reference")
        for spec in SMALL
        if spec.name in ("dry", "ties")
    }
    assert not trees["dry"].valid.all()
    assert len(np.unique(trees["ties"].score)) < len(trees["ties"].score) - 3


def test_equals_growth_by_the_model():
    """The same tree as the model's own scorer grows, from parameters that are not folded."""
    trio, embeddings = stand_in()
    spec = Spec(name="", depths=7, vocabulary=83, rank=32, heads=4, budget=9)
    config = TreeConfig(budget=spec.budget, expand=spec.expand, children=5, pool=spec.pool)
    root, pools, *_ = make_inputs(spec)
    rng = np.random.default_rng(0)
    hidden, drafted = (jnp.asarray(rng.standard_normal(s), jnp.float32) for s in ((40,), (7, 40)))
    draft = Draft(
        hidden=drafted,
        ids=pools.ids,
        logits=pools.prior,
        noise=pools.noise,
        temperature=pools.temperature,
    )

    @jax.jit
    def both():
        scorer, memory = weaver_scorer(trio, draft, hidden, slots(config))
        weights = trio.weaver.growth_weights(embeddings, trio.verifier.output_rows)
        ours = weaver_grow(root, pools, weights, memory.key, memory.value, **spec.options)
        return ours, grow(root, pools.ids, scorer, memory, config)

    assert_same_tree(*both(), tolerance=1e-5)


def stand_in():
    """A Weaver with noise on every parameter beside what it needs of a verifier, and embeddings."""
    config = WeaverConfig(
        d_model=40, d_embed=40, d_rank=32, num_heads=4, mlp_dim=24, depth=7, candidate_pool_size=16
    )
    rng = np.random.default_rng(3)
    weaver = nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0)))
    graph, state = nnx.split(weaver)
    noise = jax.tree.map(lambda x: jnp.asarray(0.3 * rng.standard_normal(x.shape), x.dtype), state)
    rows = jnp.asarray(rng.standard_normal((83, 40)), jnp.float32)
    verifier = types.SimpleNamespace(embed_tokens=lambda token: rows[token], output_rows=0.1 * rows)
    return types.SimpleNamespace(weaver=nnx.merge(graph, noise), verifier=verifier), rows


# The kernels one by one.


def close(actual, exact, tolerance: float = 1e-6) -> None:
    exact = np.asarray(exact, np.float64)
    difference = np.linalg.norm(np.asarray(actual, np.float64) - exact)
    assert difference <= tolerance * np.linalg.norm(exact)


@pytest.mark.parametrize(
    ("nodes", "inner", "outer", "dtype"),
    [
        (1, 32, 24, jnp.float32),
        (3, 90, 21, jnp.float32),  # neither pieces nor blocks divide
        (4, 640, 40, jnp.float32),  # several chunks
        (16, 33, 17, jnp.bfloat16),
    ],
)
def test_project(nodes, inner, outer, dtype):
    rng = np.random.default_rng(0)

    def normal(*shape):
        return jnp.asarray(rng.standard_normal(shape), dtype)

    projection = Projection(normal(outer, inner), normal(outer))
    x, residual = normal(nodes, inner), normal(nodes, outer)
    wide = jax.tree.map(reference.widen, projection)
    exact = np.stack([reference.project(row, wide) for row in reference.widen(x)])
    exact = reference.widen(residual) + exact
    small = dataclasses.replace(Config(), project_bytes=4096, project_columns=32)
    how = {"residual": residual, "interpret": True, "config": small}
    y = jax.jit(functools.partial(project, **how))(x, projection)
    assert y.dtype == dtype
    close(y, exact, 1e-6 if dtype == jnp.float32 else 1e-2)


@pytest.fixture
def growth() -> Growth:
    """A growth of eleven rows under a prefix of five, three nodes of it about to be expanded."""
    spec = Spec(name="", budget=10, expand=5, rank=21, heads=3)
    _, _, _, key, value = make_inputs(spec)
    rng = np.random.default_rng(1)
    key, value = (jnp.asarray(rng.standard_normal(x[0].shape), jnp.float32) for x in (key, value))
    growth = plant(jnp.int32(3), spec.rows, 4, (key,), (value,))
    ancestors = np.tril(rng.random((11, 11)) < 0.5)
    ancestors[6:9, 6:9] = False
    np.fill_diagonal(ancestors, True)
    return growth._replace(ancestors=jnp.asarray(ancestors, jnp.int8))


@pytest.mark.parametrize("rotary", [False, True])
def test_attend_reads_no_more_than_is_visible(growth, rotary):
    rng = np.random.default_rng(2)
    qkv = jnp.asarray(rng.standard_normal((3, 3 * 24 if rotary else 3 * 21)), jnp.float32)
    key, value = growth.key[0], growth.value[0]
    rotation = None
    if rotary:
        key, value = (jnp.pad(x, ((0, 0), (0, 0), (0, 1))) for x in (key, value))
        angle = jnp.asarray(rng.standard_normal((5, 4)), jnp.float32)
        rotation = Rotation(jnp.cos(angle), jnp.sin(angle))
    start, depth = jnp.int32(6), jnp.asarray([1, 3, 0], jnp.int32)
    arguments = (qkv, depth, key, value, growth, start, rotation)
    expected = jax.jit(xla.attend)(*arguments)
    poison = jnp.arange(16)[:, None] >= 5 + 6  # rows that nobody has written
    arguments = (
        qkv, depth, *(jnp.where(poison, jnp.nan, x) for x in (key, value)), *arguments[4:]
    )  # fmt: skip
    actual = jax.jit(functools.partial(attend, **{**HOW, "config": Config(attend_block=8)}))(
        *arguments
    )
    close(actual[0], expected[0])
    for x, y in zip(actual[1:], expected[1:], strict=True):
        np.testing.assert_allclose(x[:, :14], y[:, :14], 1e-6, 1e-6)
        assert np.isnan(x[:, 14:]).all()


def test_score_of_no_candidate_is_minus_infinity():
    spec = SMALL[2]
    _, pools, weights, *_ = make_inputs(spec)
    depth = jnp.asarray([0, 3, 9], jnp.int32)  # beyond the last depth too
    query = jnp.asarray(np.random.default_rng(0).standard_normal((3, spec.rank)), jnp.float32)
    level = jnp.minimum(depth, spec.depths - 1)
    head = weights.head.at[pools.ids[0, 0]].set(jnp.nan)  # met by the first node alone
    weights = weights._replace(head=head)
    expected = jax.jit(xla.score)(query, level, weights, pools)
    kernel = functools.partial(score, **HOW)
    actual = jax.jit(kernel)(query, depth, head, weights.out_norm, pools)
    np.testing.assert_allclose(actual, expected, 1e-5, 1e-5)
    assert np.isneginf(actual[:, -4:]).all()


def test_offers_are_ordered_with_ties(growth):
    logits = np.float32([[0, 1, 1, -np.inf, 1, 0, 2], [5] * 7, [-np.inf] * 7, [np.nan] * 7])
    spec = Spec(name="", pool=7)
    _, pools, *_ = make_inputs(spec)
    nodes = Nodes(jnp.zeros((4, 1)), jnp.asarray([0, 3, 1, 2], jnp.int32), jnp.zeros(4))
    result = {}
    for name, function in (("pallas", functools.partial(offer, **HOW)), ("xla", xla.offer)):
        call = jax.jit(lambda x, f=function: f(growth, nodes, x, pools, jnp.int32(6)))
        result[name] = call(logits)
    actual, expected = result["pallas"], result["xla"]
    assert np.asarray(actual.offered_rank[6:8]).tolist() == [[6, 1, 2, 4], [0, 1, 2, 3]]
    np.testing.assert_allclose(actual.offered_score, expected.offered_score, 1e-6)
    for name in ("offered_rank", "offered_token"):
        x, y = (getattr(r, name) for r in (actual, expected))
        np.testing.assert_array_equal(x[6:8], y[6:8])
    assert np.isneginf(actual.offered_score[8:]).all()
    assert np.isneginf(actual.offered_score[:6]).all()


@pytest.mark.parametrize(
    ("nodes", "open_"), [([0.0, -np.inf, 0.0], [1, 0, 1]), ([0.0, 0.0, 0.0], [1, 1, 0])]
)
def test_nodes_that_offer_nothing(growth, nodes, open_):
    """Padding has no score; a node of the last depth has no candidates below."""
    depth = jnp.asarray([0, 1, 4 if not open_[2] else 2], jnp.int32)
    batch = Nodes(jnp.zeros((3, 1)), depth, jnp.asarray(nodes, jnp.float32))
    _, pools, *_ = make_inputs(Spec(name="", pool=7))
    logits = jnp.zeros((3, 7))
    call = jax.jit(lambda g: offer(g, batch, logits, pools, jnp.int32(6), **HOW))
    offered = np.asarray(call(growth).offered_score[6:9])
    assert np.isfinite(offered).all(axis=1).tolist() == [bool(x) for x in open_]


take_five = jax.jit(functools.partial(take, width=5, depths=4, **HOW))
take_five_by_xla = jax.jit(functools.partial(xla.take, width=5, depths=4))


@pytest.mark.parametrize("offers", ["ties", "few", "none"])
def test_take_breaks_ties_and_pads(growth, offers):
    score_ = np.full((11, 4), -np.inf, np.float32)
    if offers == "ties":
        score_[[0, 2, 5]] = [[-1, -1, -2, -3], [-1, -2, -2, -2], [-0.5, -1, -1, -1]]
        taken = [(5, 0), (0, 1), (2, 0), (5, 1), (5, 2)]  # the first of row 0 is taken already
    else:
        score_[1, :2] = [-1, -1] if offers == "few" else -np.inf
        taken = [(1, 0), (1, 1)] if offers == "few" else []
    growth = growth._replace(
        offered_score=jnp.asarray(score_),
        offered_token=jnp.arange(44, dtype=jnp.int32).reshape(11, 4),
        taken=growth.taken.at[0].set(1),
        depth=jnp.arange(11, dtype=jnp.int32),
    )
    table = jnp.asarray(np.random.default_rng(0).standard_normal((50, 21)), jnp.float32)
    after, nodes = take_five(growth, table, table[:4], jnp.int32(6))
    weights = Weights(table=table, head=table, blocks=(), out_norm=None, position=table[:4])
    expected = take_five_by_xla(growth, weights, jnp.int32(6))
    rows = [(p, 4 * p + order) for p, order in taken]
    padding = 5 - len(taken)
    assert list(zip(after.parent[6:], after.token[6:], strict=True)) == rows + [(-1, 0)] * padding
    for name in Growth._fields[:8]:
        np.testing.assert_array_equal(getattr(after, name), getattr(expected[0], name), name)
    for x, y in zip(nodes, expected[1], strict=True):
        np.testing.assert_array_equal(x, y)


# What runs where, and what is refused.


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("rotary", jnp.float32),
        ("two_blocks", jnp.bfloat16),
        ("real_learned", jnp.float32),
        ("real_learned", jnp.bfloat16),
    ],
)
def test_lowering_for_hopper(name, dtype):
    spec = next(spec for spec in (*SMALL, *REAL) if spec.name == name)
    small = dataclasses.replace(spec, vocabulary=64, pool=min(spec.pool, 64))
    if spec in REAL:
        small = dataclasses.replace(small, rank=256, heads=2, inner=256)
    _, pools, weights, key, value = make_inputs(small, dtype=dtype)
    how = {"config": Config(), "interpret": False}

    def one_round(growth, weights, pools, start):
        growth, nodes = kernels.take(
            growth, weights, start, width=small.expand, depths=small.depths, **how
        )
        return kernels.expand(growth, nodes, weights, pools, start, activation=small.activation,
                              **how)  # fmt: skip

    growth = plant(jnp.int32(0), small.rows, small.children, key, value)
    text = lower_for_hopper(one_round, growth, weights, pools, jnp.int32(1))
    # take, score and offer; attend, out and down for each block
    launches = 3 + 3 * small.blocks
    assert text.count("__gpu$xla.gpu.triton") == launches


def test_auto_takes_xla_on_a_cpu(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "cpu")
    monkeypatch.setattr(kernels, "expand", None)
    spec = SMALL[0]
    call = functools.partial(weaver_grow, **spec.options)
    assert jax.eval_shape(call, *make_inputs(spec)).token.shape == (spec.budget + 1,)


def test_unsupported_platform_falls_back_once_or_refuses(monkeypatch):
    monkeypatch.setattr(jax, "default_backend", lambda: "tpu")
    choice._warn_once.cache_clear()
    spec = dataclasses.replace(SMALL[0], budget=4)
    inputs = make_inputs(spec)
    with pytest.warns(UserWarning, match="weaver_grow falls back to XLA.*platform 'tpu'"):
        jax.eval_shape(functools.partial(weaver_grow, **spec.options), *inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(functools.partial(weaver_grow, **spec.options), *inputs)
    with pytest.raises(NotImplementedError, match="platform 'tpu'"):
        weaver_grow(*inputs, **spec.options, implementation="pallas")


@pytest.mark.parametrize(
    ("spec", "message"),
    [
        (
            Spec(name="width", expand=17, budget=17),
            "at most 16 nodes at once are supported, got 17",
        ),
        (
            Spec(name="pool", pool=1025, vocabulary=1025),
            "at most 1024 candidates of a depth are supported, got 1025",
        ),
        (
            Spec(name="budget", budget=284),  # a root, and a prefix of five
            "at most 288 memory rows, prefix and tree, are supported, got 290",
        ),
    ],
    ids=lambda x: x.name if isinstance(x, Spec) else "",
)
def test_sizes_beyond_the_kernels_fall_back_once_or_are_refused(monkeypatch, spec, message):
    inputs = make_inputs(spec)
    call = functools.partial(weaver_grow, **spec.options)
    with pytest.raises(NotImplementedError, match=message):
        call(*inputs, implementation="pallas")
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(kernels, "expand", None)
    choice._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"weaver_grow falls back to XLA: {message}"):
        jax.eval_shape(call, *inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        jax.eval_shape(call, *inputs)


def test_kernels_take_a_budget_of_256_at_any_width():
    refusals = {kernels.unsupported(w, 1024, 16 + growth_rows(256, w)) for w in range(1, 17)}
    assert refusals == {None}


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"budget": 0}, ValueError, "budget must be a positive integer, got 0"),
        ({"activation": "relu"}, ValueError, "activation must be one of gelu_tanh, gelu_erf"),
        ({"implementation": "triton"}, ValueError, "implementation must be one of auto, pallas"),
        ({"root": jnp.float32(1)}, TypeError, "root must be int32, got float32"),
        ({"root": jnp.zeros(1, jnp.int32)}, ValueError, r"root must be \(\), got \(1,\)"),
        ({"key": (jnp.zeros((4, 13, 8)),)}, ValueError, "key must have rows for a prefix and 13"),
        ({"key": ()}, ValueError, "one memory for each of 1 blocks"),
        ({"value": (jnp.zeros((4, 18, 4)),)}, ValueError, r"value must be \(4, 18, 8\)"),
        ({"activation": "silu_gated"}, ValueError, r"blocks\[0\].up.weight must be \(48, 32\)"),
    ],
)
def test_refuses_bad_arguments(change, error, message):
    spec = SMALL[0]
    names = ("root", "pools", "weights", "key", "value")
    good = dict(zip(names, make_inputs(spec), strict=True)) | spec.options
    with pytest.raises(error, match=message):
        weaver_grow(**{**good, **change})


@pytest.mark.parametrize(
    ("field", "value", "error", "message"),
    [
        ("table", np.zeros((83, 32), np.float16), TypeError, "table must be float32 or bfloat16"),
        ("table", jnp.zeros((83, 40)), ValueError, r"weights.table must be \(83, 32\)"),
        ("head", np.zeros((80, 32), np.float32), ValueError, r"weights.head must be \(83, 32\)"),
        ("position", jnp.zeros((3, 32)), ValueError, "position must have 4 rows or more, got 3"),
        ("out_norm", Norm(jnp.ones(32), jnp.ones(3)), ValueError, r"out_norm.bias must be \(32,\)"),
        ("out_norm", Norm(jnp.ones(32), jnp.ones(32, "bfloat16")), TypeError, "out_norm must be"),
        ("blocks", BARE, ValueError, r"blocks\[0\].qkv.norm must be given"),
        ("rotation", Rotation(*jnp.zeros((2, 4, 4))), ValueError, "rotation must have 5 rows"),
    ],
)
def test_refuses_bad_weights(field, value, error, message):
    spec = SMALL[0]
    root, pools, weights, *memory = make_inputs(spec)
    with pytest.raises(error, match=message):
        weaver_grow(root, pools, weights._replace(**{field: value}), *memory, **spec.options)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("ids", jnp.zeros((4, 16)), "pools.ids must be int32, got float32"),
        ("noise", jnp.zeros((4, 15)), r"pools.noise must be \(4, 16\), got \(4, 15\)"),
        ("temperature", jnp.ones(2), r"pools.temperature must be \(\), got \(2,\)"),
        ("ids", jnp.zeros((0, 16), jnp.int32), "not empty"),
    ],
)
def test_refuses_bad_pools(field, value, message):
    spec = SMALL[0]
    root, pools, *rest = make_inputs(spec)
    with pytest.raises((TypeError, ValueError), match=message):
        weaver_grow(root, pools._replace(**{field: value}), *rest, **spec.options)
