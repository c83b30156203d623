"""python scripts/convert_weights.py SRC DST [--drafter DIR] [--weaver PATH] [--dtype bfloat16]"""

import tyro

from tfm_jax.checkpoints.command import convert_command

if __name__ == "__main__":
    tyro.cli(convert_command)
