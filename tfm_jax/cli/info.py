"""`tfm info`: the machine and a model, without loading its weights."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table

from tfm_jax.cli.output import print_json, show
from tfm_jax.cli.setting import kernel_path, run_setting
from tfm_jax.config import MAX_END_TOKENS, TreeConfig

if TYPE_CHECKING:
    from tfm_jax.checkpoints.trio import OpenedTrio


def info(
    *,
    model: str = "pocket",
    dtype: Literal["float32", "bfloat16"] | None = None,
    json: bool = False,
) -> None:
    """Show versions, device, kernel path, and a model's sizes and limits; loads no weights.

    Args:
      model: "pocket", or a directory made by `tfm convert`.
      dtype: Type of weights and activations. [default: float32 on a CPU, else bfloat16]
      json: Print one JSON object and nothing else.
    """
    found = _describe(model, dtype)
    if json:
        print_json(found)
    else:
        show(_table(found))


def _describe(model: str, dtype: str | None) -> dict[str, Any]:

    from tfm_jax.checkpoints.build import parameter_shapes
    from tfm_jax.checkpoints.trio import open_trio
    from tfm_jax.model import default_dtype, directory

    opened = open_trio(directory(model))
    config = opened.verifier.config
    dtype = default_dtype(dtype)
    rows = TreeConfig.budget + 1
    return {
        **run_setting(model, dtype, rows),
        "kernels_because": kernel_path(rows)[1],
        "parameters": {
            name: sum(math.prod(shape) for shape in parameter_shapes(part.config).values())
            for name, part in opened.parts().items()
        },
        "vocabulary": {"rows": config.vocab_size, "tokens": _tokens(opened)},
        "limits": {
            "positions": config.max_position_embeddings,
            "draft_depth": _depth(opened),
            "end_tokens": MAX_END_TOKENS,
        },
        "end_tokens": list(config.eos_token_ids),
        "cache_bytes": cache_bytes(opened, dtype),
    }


def cache_bytes(opened: OpenedTrio, dtype: str) -> dict[str, int]:
    """Bytes that decoding keeps: for every position, and whatever the length.

    Taken from the shapes of real states of two lengths; nothing is allocated.
    """
    import jax
    import jax.numpy as jnp
    from flax import nnx

    from tfm_jax.decoding.state import Trio, empty_state
    from tfm_jax.models.dflash import Drafter
    from tfm_jax.models.qwen36 import Verifier

    def state(capacity: int):
        rngs, kind = nnx.Rngs(0), jnp.dtype(dtype)
        drafter = opened.drafter and Drafter(opened.drafter.config, rngs=rngs, dtype=kind)
        verifier = Verifier(opened.verifier.config, rngs=rngs, dtype=kind)
        return empty_state(Trio(verifier=verifier, drafter=drafter), capacity)

    def size(capacity: int) -> int:
        leaves = jax.tree.leaves(jax.eval_shape(lambda: state(capacity)))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    one, two = size(256), size(512)
    per_token = (two - one) // 256
    return {"per_token": per_token, "fixed": one - 256 * per_token}


def _tokens(opened: OpenedTrio) -> int | None:
    from tfm_jax.text import load_tokenizer

    file = opened.text_files / "tokenizer.json"
    return load_tokenizer(file).vocab_size if file.is_file() else None


def _depth(opened: OpenedTrio) -> int:
    if opened.drafter is None:
        return 0
    drafted = opened.drafter.config.depth
    return drafted if opened.weaver is None else min(drafted, opened.weaver.config.depth)


def _table(found: dict[str, Any]) -> Table:
    table = Table.grid(padding=(0, 2))
    vocabulary, limits, cache = found["vocabulary"], found["limits"], found["cache_bytes"]
    tokens = "no tokenizer" if vocabulary["tokens"] is None else f"{vocabulary['tokens']} tokens"
    lines = {
        "tfm_jax, jax": f"{found['tfm_jax']}, {found['jax']}",
        "device": f"{found['device']} ({found['platform']})",
        "kernels": f"{found['kernels']}: {found['kernels_because']}",
        "model": found["model"],
        "dtype": found["dtype"],
        **{name: f"{count:,} parameters" for name, count in found["parameters"].items()},
        "vocabulary": f"{tokens}, {vocabulary['rows']} rows",
        "end tokens": " ".join(map(str, found["end_tokens"])) or "none",
        "positions": f"at most {limits['positions']:,}",
        "draft depth": f"at most {limits['draft_depth']}",
        "caches": f"{cache['per_token']:,} bytes a token and {cache['fixed']:,} fixed",
    }
    for name, value in lines.items():
        table.add_row(name, str(value))
    return table
