"""Which code a result was measured with."""

import functools
import pathlib
import shutil
import subprocess


def commit_id() -> str:
    """Short hash of the checked-out commit, with "+" if files differ.

    "unknown" outside a checkout, and where there is no git.
    """
    if shutil.which("git") is None:
        return "unknown"
    root = pathlib.Path(__file__).parents[1]
    git = functools.partial(subprocess.run, cwd=root, capture_output=True, text=True, check=False)
    head = git(["git", "rev-parse", "--short", "HEAD"]).stdout.strip()
    changed = git(["git", "status", "--porcelain", "--untracked-files=no"]).stdout.strip()
    return (head + "+" * bool(changed)) or "unknown"
