"""Losses and gradients against golden arrays, and rows that must not count."""

from __future__ import annotations

import json
import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from tfm_jax.config import DrafterConfig, WeaverConfig
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.weaver import Weaver, pool_logits
from tfm_jax.training import losses

FIXTURES = Path(__file__).parents[1] / "fixtures"
DFLASH, WEAVER = FIXTURES / "dflash_tiny", FIXTURES / "weaver_tiny"
VARIANTS = {
    "learned_gelu": "weaver_fused_qkv.safetensors",
    "rope_swiglu": "weaver.safetensors",
}


def find(module: nnx.Module, name: str) -> nnx.Param:
    target = module
    for part in name.split("."):
        target = target[int(part)] if part.isdigit() else getattr(target, part)
    return target


def assign(module: nnx.Module, tensors: dict[str, np.ndarray]) -> None:
    for name, tensor in tensors.items():
        find(module, name).set_value(jnp.asarray(tensor, jnp.float32))


def label_log_probs(logits: jax.Array, labels: np.ndarray) -> jax.Array:
    log_probs = jax.nn.log_softmax(logits, axis=-1)
    return jnp.take_along_axis(log_probs, labels[..., None], axis=-1)[..., 0]


def close_gradient(got, expected, name: str) -> None:
    np.testing.assert_allclose(got, expected, atol=1e-5, rtol=1e-3, err_msg=name)


@pytest.fixture(scope="module")
def train() -> dict[str, np.ndarray]:
    """The drafter's training fixture, with the labels of every block row and which count."""
    arrays = dict(np.load(DFLASH / "train.npz"))
    golden = np.load(DFLASH / "golden.npz")
    arrays |= {name: golden[name] for name in ("embed_tokens", "lm_head")}
    positions = arrays["anchors"][0][:, None] + np.arange(8)
    inside = np.minimum(positions, 47)
    arrays["labels"] = arrays["input_ids"][0, inside]
    arrays["counted"] = (
        (positions < 48) & (arrays["loss_mask"][0, inside] > 0) & arrays["block_keep"][0][:, None]
    )
    return arrays


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_drafter_losses_equal_the_golden_values(train, kind):
    logits = jnp.asarray(train[f"hidden_{kind}"]) @ train["lm_head"].T
    log_probs, valid = label_log_probs(logits, train["labels"]), train["counted"]
    assert valid[:, 1:].sum() == train[f"supervised_{kind}"]
    hits = valid[:, 1:] & (logits.argmax(-1) == train["labels"])[:, 1:]
    assert hits.sum() == train[f"accuracy_{kind}"]
    got = {
        "decay7": losses.decayed_cross_entropy(log_probs, valid, gamma=7.0),
        "flat": losses.decayed_cross_entropy(log_probs, valid, gamma=math.inf),
        "dpace": losses.dpace_cross_entropy(log_probs, valid, batch_size=1, alpha=0.5),
    }
    for name, value in got.items():
        np.testing.assert_allclose(value, train[f"loss_{name}_{kind}"], rtol=2e-6, err_msg=name)


@pytest.mark.parametrize("kind", ["full", "sliding"])
def test_drafter_gradients_equal_the_golden_arrays_and_stay_finite(train, kind):
    name = "config.json" if kind == "full" else "config_sliding.json"
    config = DrafterConfig.from_hf(json.loads((DFLASH / name).read_text()))
    drafter = nnx.eval_shape(lambda: Drafter(config, rngs=nnx.Rngs(0)))
    assign(drafter, load_file(DFLASH / "model.safetensors"))
    ids = np.full((7, 8), config.mask_token_id)
    ids[:, 0] = train["input_ids"][0, train["anchors"][0]]
    blocks, anchors = jnp.asarray(train["embed_tokens"][ids]), jnp.asarray(train["anchors"][0])

    @jax.jit
    def value_and_gradient(drafter, features):
        def loss(drafter):
            hidden = drafter.blocks(features, blocks, anchors, train["block_keep"][0])
            logits = hidden @ train["lm_head"].T
            log_probs = label_log_probs(logits, train["labels"])
            return losses.decayed_cross_entropy(log_probs, train["counted"], gamma=7.0)

        return jax.value_and_grad(loss)(drafter)

    features = jnp.asarray(train["target_hidden"][0])
    value, gradient = value_and_gradient(drafter, features)
    np.testing.assert_allclose(value, train[f"loss_decay7_{kind}"], rtol=5e-6)
    names = [name for name in train if name.startswith(f"grad_{kind}:")]
    assert len(names) == 4
    for name in names:
        close_gradient(find(gradient, name.split(":")[1])[...], train[name], name)
    for scale in (0.0, 1e6):
        leaves = jax.tree.leaves(value_and_gradient(drafter, scale * features))
        assert all(bool(jnp.all(jnp.isfinite(leaf))) for leaf in leaves), scale


def test_drafter_losses_equal_their_definition():
    rng = np.random.default_rng(0)
    log_probs = np.log(rng.uniform(0.05, 0.9, (2, 3, 5))).astype(np.float32)
    valid = rng.uniform(size=(2, 3, 5)) > 0.3
    total = weight_sum = expected_length = 0.0
    slopes = []
    for block, counted in zip(log_probs.reshape(-1, 5), valid.reshape(-1, 5), strict=True):
        for j in range(1, 5):
            reached = [
                math.prod(0.3 * math.exp(block[i]) + 0.7 for i in range(1, end + 1) if counted[i])
                for end in range(j, 5)
                if counted[end]
            ]
            if counted[j]:
                total -= math.exp(-(j - 1) / 4) * block[j]
                weight_sum += math.exp(-(j - 1) / 4)
                expected_length -= sum(reached) * block[j]
                slopes.append(-sum(reached) / 2)
    args = jnp.asarray(log_probs), jnp.asarray(valid)
    decayed = losses.decayed_cross_entropy(*args, gamma=4.0)
    np.testing.assert_allclose(decayed, total / weight_sum, rtol=1e-5)
    dpace, gradient = jax.value_and_grad(
        lambda rows: losses.dpace_cross_entropy(rows, args[1], batch_size=2, alpha=0.7)
    )(args[0])
    np.testing.assert_allclose(dpace, expected_length / 2, rtol=1e-5)
    np.testing.assert_allclose(gradient[:, :, 1:][valid[:, :, 1:]], slopes, rtol=1e-5)


def test_rows_that_do_not_count_leave_loss_and_gradient_alone():
    rng = np.random.default_rng(1)
    log_probs = jnp.asarray(np.log(rng.uniform(0.05, 0.9, (3, 4))), jnp.float32)
    valid = jnp.ones((3, 4), bool).at[2].set(False).at[0, 1].set(False).at[1, 2].set(False)

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(log_probs, valid):
        dpace = losses.dpace_cross_entropy(log_probs, valid, batch_size=1)
        return losses.decayed_cross_entropy(log_probs, valid, gamma=7.0) + dpace

    value, gradient = loss_and_gradient(log_probs, valid)
    kept = valid.at[:, 0].set(False)
    spoilt = loss_and_gradient(jnp.where(kept, log_probs, jnp.nan), valid)
    np.testing.assert_array_equal(spoilt[0], value)
    np.testing.assert_array_equal(spoilt[1], gradient)
    np.testing.assert_array_equal(gradient != 0, kept)
    nothing = loss_and_gradient(log_probs, jnp.zeros_like(valid))
    assert nothing[0] == 0
    assert not jnp.any(nothing[1])


def test_padding_of_the_vocabulary_is_hidden():
    logits = jnp.asarray([[1.0, 3.0, 2.0, 9.0], [0.0, -1.0, -2.0, 5.0]])
    hidden = losses.without_padding(logits, 3)
    np.testing.assert_array_equal(hidden, [[1, 3, 2, -np.inf], [0, -1, -2, -np.inf]])
    assert losses.without_padding(logits, 4) is logits


@pytest.fixture(scope="module")
def inputs() -> dict[str, np.ndarray]:
    return dict(np.load(WEAVER / "inputs.npz"))


@pytest.fixture(scope="module", params=list(VARIANTS))
def variant(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def golden(variant) -> dict[str, np.ndarray]:
    return dict(np.load(WEAVER / variant / "golden.npz"))


@pytest.fixture(scope="module")
def target(inputs) -> jax.Array:
    return losses.pool_log_probs(jnp.asarray(inputs["target_logits"]), inputs["pool_ids"])


def totals(terms: losses.PoolTerms) -> dict[str, jax.Array]:
    fixed = {
        f"lk_fixed_{scale}": losses.lk_loss(terms, mode="fixed", scale=scale)
        for scale in (0.0, 0.25, 0.5, 0.75, 1.0)
    }
    return fixed | {
        "kl": losses.mean_over(terms.kl, terms.valid),
        "tv": losses.mean_over(terms.tv, terms.valid),
        "lk_position": losses.lk_loss(terms, mode="position", eta=3.0),
        "lk_depth": losses.lk_loss(terms, mode="depth", eta=3.0),
    }


def test_weaver_terms_and_totals_equal_the_golden_values(inputs, golden, target):
    valid = jnp.asarray(inputs["valid"])
    logits = jnp.asarray(golden["chain_logits"])
    everywhere = losses.pool_terms(logits, target, jnp.ones_like(valid))
    terms = losses.pool_terms(logits, target, valid)
    got = {f"loss_{name}": getattr(everywhere, name) for name in ("kl", "alpha", "tv", "pool_mass")}
    got["loss_lambda_position"] = losses.lk_weight(everywhere, mode="position")
    got["loss_lambda_depth"] = losses.lk_weight(terms, mode="depth")
    got |= {f"total_{name}": value for name, value in totals(terms).items()}
    expected = {name for name in golden if name.startswith(("loss_", "total_"))}
    assert expected - set(got) == {"total_nla"}  # a loss that nothing here trains with
    for name, value in got.items():
        np.testing.assert_allclose(value, golden[name], atol=2e-5, rtol=0, err_msg=name)


def test_weaver_gradients_equal_the_golden_arrays(inputs, golden, target, variant):
    tensors = load_file(WEAVER / variant / VARIANTS[variant])
    published = json.loads((WEAVER / variant / "config.json").read_text())
    config = WeaverConfig.from_published(published, keys=set(tensors))
    weaver = nnx.eval_shape(lambda: Weaver(config, rngs=nnx.Rngs(0)))
    assign(weaver, tensors)
    tokens = np.concatenate([inputs["root_token"][:, None], inputs["true_tokens"][:, :-1]], axis=1)
    embeddings = jnp.asarray(inputs["embed_tokens"][tokens])
    head_rows = jnp.asarray(inputs["lm_head"][inputs["pool_ids"]])
    valid, prior = jnp.asarray(inputs["valid"]), jnp.asarray(inputs["pool_prior"])
    hidden = jnp.asarray(inputs["verifier_hidden"]), jnp.asarray(inputs["drafter_hidden"])
    names = ("kl", "tv", "lk_position")

    @jax.jit
    def gradients(weaver):
        def logits_of(weaver):
            query = jax.vmap(weaver.chain)(*hidden, embeddings)
            return jax.vmap(pool_logits)(query, prior, head_rows)

        def loss(logits, name):
            return totals(losses.pool_terms(logits, target, valid))[name]

        logits, pull = jax.vjp(logits_of, weaver)
        seeds = jnp.stack([jax.grad(loss)(logits, name) for name in names])
        return jax.vmap(pull)(seeds)[0]

    stacked = gradients(weaver)
    for row, name in enumerate(names):
        for key in tensors:
            if key.endswith("qkv_proj.weight") and variant == "learned_gelu":
                parts = [key.replace("qkv_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
                expected = np.concatenate([golden[f"grad_{name}/{part}"] for part in parts])
            else:
                expected = golden[f"grad_{name}/{key}"]
            close_gradient(find(stacked, key)[...][row], expected, f"{name}/{key}")


def test_the_target_gets_no_gradient(inputs, golden, target):
    def loss(target):
        terms = losses.pool_terms(golden["chain_logits"], target, jnp.asarray(inputs["valid"]))
        return losses.lk_loss(terms)

    assert not jnp.any(jax.grad(loss)(target))


def test_lambda_passes_no_gradient(inputs, golden, target):
    valid = jnp.asarray(inputs["valid"])

    def weight(logits, mode):
        return jnp.sum(losses.lk_weight(losses.pool_terms(logits, target, valid), mode=mode))

    for mode in ("fixed", "position", "depth"):
        assert not jnp.any(jax.grad(weight)(jnp.asarray(golden["chain_logits"]), mode))


def test_weaver_rows_that_do_not_count_may_hold_nan(inputs, golden, target):
    valid = jnp.asarray(inputs["valid"])
    logits = jnp.asarray(golden["chain_logits"])

    @jax.jit
    @jax.value_and_grad
    def loss_and_gradient(logits, target, valid):
        return sum(totals(losses.pool_terms(logits, target, valid)).values())

    clean = loss_and_gradient(logits, target, valid)
    spoilt = [jnp.where(valid[..., None], x, jnp.nan) for x in (logits, target)]
    got = loss_and_gradient(*spoilt, valid)
    np.testing.assert_array_equal(got[0], clean[0])
    np.testing.assert_array_equal(got[1], clean[1])
    empty = loss_and_gradient(*(jnp.full_like(x, jnp.nan) for x in spoilt), valid & False)
    assert empty[0] == 0
    assert not jnp.any(empty[1])


def test_hostile_pools_give_finite_losses_and_gradients():
    """Nothing offered; no target mass; target outside the pool; one candidate; far apart."""
    low = -np.inf
    draft = jnp.asarray(
        [[low] * 3, [0.0, 1.0, 2.0], [0.0, 1.0, 2.0], [5.0, low, low], [1e4, -1e4, 0.0]],
        jnp.float32,
    )
    target = jnp.asarray(
        [[-1.0, -2.0, -3.0], [low] * 3, [-500.0] * 3, [-0.1, -3.0, low], [-2e4, -1e-3, -9.0]],
        jnp.float32,
    )
    valid = jnp.ones(5, bool)
    terms = losses.pool_terms(draft, target, valid)
    np.testing.assert_allclose(terms.pool_mass[:4], [0, 0, 0, np.exp(-0.1)], atol=1e-6)
    np.testing.assert_allclose(terms.alpha, [0, 0, 0, np.exp(-0.1), 0], atol=1e-6)
    np.testing.assert_allclose(terms.kl[jnp.asarray([0, 1, 3])], 0, atol=1e-6)

    @jax.jit
    def values_and_gradients(draft):
        def of(draft):
            return totals(losses.pool_terms(draft, target, valid))

        return of(draft), jax.jacrev(of)(draft)

    values, gradients = values_and_gradients(draft)
    for name, gradient in gradients.items():
        assert jnp.isfinite(values[name]), name
        assert jnp.all(jnp.isfinite(gradient)), name
        assert not jnp.any(gradient[:2]), name


def test_a_bad_logit_of_a_row_that_counts_is_not_hidden():
    draft = jnp.asarray([[0.0, jnp.nan]])
    terms = losses.pool_terms(draft, jnp.log(jnp.asarray([[0.5, 0.5]])), jnp.ones(1, bool))
    assert jnp.isnan(losses.lk_loss(terms))


def test_rows_count_as_far_as_a_tree_reaches():
    random = np.random.default_rng(5)
    q = np.array([[0.5, 0.1, 0.2, 0.9], [0.9, 0.0, 0.5, 0.5]])
    with np.errstate(divide="ignore"):
        reach = losses.tree_reach(jnp.log(jnp.asarray(q, jnp.float32)), 10)
    np.testing.assert_allclose(reach, [[1, 1, 0.5, 0.1], [1, 1, 0, 0]], rtol=1e-5)
    draft, target = (jnp.asarray(random.normal(size=(2, 4, 6)), jnp.float32) for _ in range(2))
    valid = jnp.ones((2, 4), bool).at[0, 2].set(False)

    def loss(draft: jax.Array, reach: jax.Array | None) -> jax.Array:
        terms = losses.pool_terms(draft, jax.nn.log_softmax(target), valid)
        return losses.lk_loss(terms, mode="position", eta=1.0, reach=reach)

    terms = losses.pool_terms(draft, jax.nn.log_softmax(target), valid)
    share = np.exp(-np.asarray(terms.alpha))
    rows = share * np.asarray(terms.kl) + (1 - share) * np.asarray(terms.tv)
    weights = np.asarray(reach) * np.asarray(valid)
    assert float(loss(draft, reach)) == pytest.approx((rows * weights).sum() / weights.sum(), 1e-5)
    assert float(loss(draft, None)) == pytest.approx(float(loss(draft, jnp.ones((2, 4)))), 1e-6)
    gradient = np.abs(np.asarray(jax.grad(loss)(draft, reach))).max(axis=-1)
    np.testing.assert_array_equal(gradient > 0, weights > 0)
    slope = jax.grad(lambda x: losses.tree_reach(jax.nn.log_softmax(x), 2).sum())(draft[..., 0])
    np.testing.assert_array_equal(slope, 0)
    with pytest.raises(ValueError, match="nodes must be positive, got 0"):
        losses.tree_reach(jnp.zeros((1, 2)), 0)


def test_noise_is_that_of_the_draw():
    """Noise made for drawn tokens is Gumbel noise, as that is which draws the tokens."""
    p = np.array([0.5, 0.3, 0.15])  # and 0.05 outside the pool
    random = np.random.default_rng(0)
    tokens = random.choice(4, size=40_000, p=[*p, 0.05])
    log_p = jnp.broadcast_to(jnp.log(jnp.asarray(p, jnp.float32)), (tokens.size, 3))
    drawn = jnp.asarray(tokens)[:, None] == jnp.arange(3)
    noise = np.asarray(losses.drawing_noise(jax.random.key(1), log_p, drawn))
    best = np.argmax(np.log(p) + noise, axis=-1)
    np.testing.assert_array_equal(best[tokens < 3], tokens[tokens < 3])
    # A Gumbel variable has mean 0.5772 and variance pi^2 / 6; 40,000 draws know both to 0.03.
    np.testing.assert_allclose(noise.mean(axis=0), 0.5772, atol=0.03)
    np.testing.assert_allclose(noise.var(axis=0), np.pi**2 / 6, atol=0.06)
    np.testing.assert_allclose(np.corrcoef(noise.T)[np.triu_indices(3, 1)], 0, atol=0.02)
    alone = jnp.asarray([[-jnp.inf, 0.0, -jnp.inf]])
    found = losses.drawing_noise(jax.random.key(1), alone, alone == 0)
    np.testing.assert_array_equal(found, np.zeros((1, 3)))


def test_a_share_of_the_loss_is_the_cross_entropy_of_the_draw():
    draft = jnp.asarray(np.random.default_rng(6).normal(size=(3, 4)), jnp.float32)
    valid = jnp.ones((3,), bool)
    terms = losses.pool_terms(draft, jax.nn.log_softmax(draft[::-1]), valid)
    drawn = jnp.asarray([-1.0, -3.0, -jnp.inf])
    plain = float(losses.lk_loss(terms, mode="fixed"))
    found = float(losses.lk_loss(terms, mode="fixed", drawn=drawn, share=0.25))
    assert found == pytest.approx(0.75 * plain + 0.25 * 4 / 3, rel=1e-6)
    assert np.isfinite(jax.grad(lambda d: losses.lk_loss(terms, drawn=d, share=0.5))(drawn)).all()


def test_a_place_without_a_candidate_has_no_probability():
    logits = jnp.log(jnp.asarray([[0.5, 0.25, 0.25]]))
    log_probs = losses.pool_log_probs(logits, jnp.asarray([[-1, 2]]))
    np.testing.assert_allclose(log_probs, [[-np.inf, np.log(0.25)]], rtol=1e-6)


def test_settings_outside_their_range_are_refused():
    rows = jnp.zeros((1, 3)), jnp.ones((1, 3), bool)
    with pytest.raises(ValueError, match="gamma"):
        losses.decayed_cross_entropy(*rows, gamma=0.0)
    with pytest.raises(ValueError, match="batch_size"):
        losses.dpace_cross_entropy(*rows, batch_size=0)
    with pytest.raises(ValueError, match="alpha"):
        losses.dpace_cross_entropy(*rows, batch_size=1, alpha=1.5)
    terms = losses.pool_terms(jnp.zeros((1, 2)), jnp.zeros((1, 2)), jnp.ones(1, bool))
    with pytest.raises(ValueError, match="fixed, position or depth"):
        losses.lk_weight(terms, mode="row")
