"""What a script does with options that no run could have."""

import contextlib
import re

import pytest


@contextlib.contextmanager
def refused(capsys, message: str):
    """Expects the body to end with status 2 and one line on stderr that matches `message`."""
    with pytest.raises(SystemExit) as stop:
        yield
    last = capsys.readouterr().err.splitlines()[-1]
    assert stop.value.code == 2
    assert re.search(message, last), last
