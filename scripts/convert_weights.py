"""python scripts/convert_weights.py SRC DST [--drafter DIR] [--weaver PATH] [--dtype bfloat16]

The same as `tfm convert`.
"""

import sys

from tfm_jax.cli import main

if __name__ == "__main__":
    sys.exit(main(["convert", *sys.argv[1:]]))
