"""What "auto" stands for where kernels run, and where another form was asked for."""

from __future__ import annotations

import threading
from types import SimpleNamespace

import jax
import pytest

from pallas_kernels import choice
from pallas_kernels.choice import automatic, choose


def test_auto_is_what_was_asked_for_in_all_threads(monkeypatch) -> None:
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [SimpleNamespace(compute_capability="9.0")])
    assert choose("op", "auto") == "pallas"
    elsewhere = []
    with automatic("xla"):
        thread = threading.Thread(target=lambda: elsewhere.append(choose("op", "auto")))
        thread.start()
        thread.join()
        assert choose("op", "auto") == "xla"
        assert choose("op", "pallas") == "pallas"
        assert choose("op", "reference") == "reference"
    assert elsewhere == ["xla"]
    with pytest.raises(ValueError, match="fast"), automatic("reference"):
        choose("op", "fast")
    assert choose("op", "auto") == "pallas"


@pytest.mark.parametrize("capability", ["7.5", "8.9", "12.0"])
def test_cards_with_little_shared_memory_fall_back(monkeypatch, capability) -> None:
    device = SimpleNamespace(compute_capability=capability)
    monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
    monkeypatch.setattr(jax, "local_devices", lambda: [device])
    choice._warn_once.cache_clear()
    with pytest.warns(UserWarning, match=f"falls back to XLA: .* 9.0, .*got {capability}"):
        assert choose("op", "auto") == "xla"
    with pytest.raises(NotImplementedError, match=f"got {capability}"):
        choose("op", "pallas")


def test_unknown_forms_are_refused() -> None:
    with pytest.raises(ValueError, match="must be one of auto, pallas"), automatic("fast"):
        pass
    with pytest.raises(ValueError, match="got 'fast'"):
        choose("op", "fast")
