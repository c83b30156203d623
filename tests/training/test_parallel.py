"""A run that splits its batches among devices learns what a run on one device learns."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.test_checkpoint import python
from tfm_jax.training.parallel import Spread

BOTH = """
import contextlib
import sys
from pathlib import Path
import jax, numpy as np
from flax import nnx
from tests.conftest import DRAFTER, VERIFIER, WEAVER
from tfm_jax.models.dflash import Drafter
from tfm_jax.models.qwen36 import Verifier
from tfm_jax.training.checkpoint import Checkpoints
from tfm_jax.training.continuations import Continuations
from tfm_jax.training.parallel import Spread
from tfm_jax.training.trainer import OptimiserConfig
from tfm_jax.training.weaver import WeaverRecipe, initial_weaver, train_weaver

assert len(jax.devices()) == 2
random = np.random.default_rng(0)
texts = Continuations(
    tokens=random.integers(0, 80, (6, 24)).astype(np.uint16),
    prompt=np.array([3, 4, 5, 6, 7, 8], np.int32),
    temperature=np.array([0, 1, 0, 1, 0, 1], np.float32),
)
networks = Verifier(VERIFIER, rngs=nnx.Rngs(1)), Drafter(DRAFTER, rngs=nnx.Rngs(2))
recipe = WeaverRecipe(rows=4, anchors=3, nodes=8, noise=0.5)
counts = set()

def train(devices, folder=None, stop=4):
    losses = []

    def record(values):
        if values["step"] == stop:
            raise RuntimeError("stopped")
        losses.append(values["loss"])
        counts.add(values["flops_per_step"])

    with contextlib.ExitStack() as stack:
        checkpoints = folder and stack.enter_context(Checkpoints(folder, {}, every=0))
        state = train_weaver(
            WEAVER, *networks, texts, OptimiserConfig(steps=3), recipe,
            vocab_limit=83, log_every=1, on_record=record, checkpoints=checkpoints,
            spread=Spread(count=devices),
        )
    assert all(len(x.devices()) == 1 for x in jax.tree.leaves(state))
    return state.params, losses

split = Spread(count=2).split(np.zeros((4, 24), np.int32))
assert [s.data.shape for s in split.addressable_shards] == [(2, 24)] * 2
one, losses = train(1)
two, split_losses = train(2)
try:
    train(2, Path(sys.argv[1]), stop=3)
except RuntimeError as error:
    assert str(error) == "stopped"
resumed, last = train(1, Path(sys.argv[1]))
try:
    Spread(count=2).check(3)
    raise AssertionError("3 rows split in two")
except ValueError as error:
    assert "3 rows a step do not split among 2 devices" in str(error)
np.testing.assert_allclose(split_losses, losses, rtol=1e-4)
np.testing.assert_allclose(last, losses[2:], rtol=1e-4)
assert len(set(losses)) == 3
assert len(counts) == 1, counts
moved = 0.0
start = initial_weaver(WEAVER)
for path in one:
    np.testing.assert_allclose(two[path], one[path], atol=1e-4, err_msg=path)
    np.testing.assert_allclose(resumed[path], one[path], atol=1e-4, err_msg=path)
    moved = max(moved, float(abs(one[path] - start[path]).max()))
assert moved > 5e-3, moved
"""


@pytest.mark.slow
def test_two_devices_learn_what_one_learns_and_hand_a_run_over(tmp_path: Path) -> None:
    done = python(BOTH, tmp_path, devices=2)
    assert done.returncode == 0, done.stderr


def test_devices_and_rows_are_checked() -> None:
    with pytest.raises(ValueError, match="devices must be positive, got 0"):
        Spread(count=0)
    with pytest.raises(ValueError, match=r"4096 devices asked for, \d+ found"):
        Spread(count=4096)
    rows = {"tokens": [1, 2]}
    assert Spread().split(rows) is rows
    Spread().check(3)
