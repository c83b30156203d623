"""Prints generated problems as JSON lines: `problems.py PACKAGES FAMILY SIZE SEED`.

Runs in a process of its own with the folder PACKAGES first on the path, so that the generator
package and its dependencies never enter this project's environment. It imports nothing of the
project for the same reason.
"""

import json
import sys


def main() -> None:
    """One line `{"question", "answer", "worked"}` a problem; `worked` is "" where none exists."""
    packages, family, size, seed = sys.argv[1:]
    sys.path.insert(0, packages)
    import reasoning_gym  # pyright: ignore[reportMissingImports]

    for problem in reasoning_gym.create_dataset(family, size=int(size), seed=int(seed)):
        row = {
            "question": problem["question"],
            "answer": problem["answer"],
            "worked": problem["metadata"].get("answer_cot", ""),
        }
        print(json.dumps(row))


if __name__ == "__main__":
    main()
