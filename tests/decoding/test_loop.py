"""Compiler options of the device loop."""

import jax
import pytest

from tfm_jax.decoding import generate


def test_this_xla_can_put_the_loop_into_one_graph(recwarn):
    options = generate._one_graph()
    assert options is not None
    assert "WHILE" in options["xla_gpu_enable_command_buffer"]
    assert not recwarn.list


def test_an_xla_that_cannot_is_told_of(monkeypatch):
    monkeypatch.setattr(generate, "_IN_GRAPHS", ("FUSION", "NEITHER_KNOWN"))
    with pytest.warns(UserWarning, match=r"host takes part in every round: .*NEITHER_KNOWN"):
        assert generate._one_graph() is None


def test_flags_of_the_user_come_first(monkeypatch, recwarn):
    monkeypatch.setenv("XLA_FLAGS", "--xla_gpu_enable_command_buffer=")
    assert generate._one_graph() is None
    assert not recwarn.list


def test_other_errors_are_not_taken_for_a_missing_option(monkeypatch):
    def fail(*args, **options):
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: out of memory")

    monkeypatch.setattr(generate.jax, "jit", fail)
    with pytest.raises(jax.errors.JaxRuntimeError, match="RESOURCE_EXHAUSTED"):
        generate._one_graph()


@pytest.mark.parametrize(("backend", "asked"), [("gpu", 1), ("cpu", 0)])
def test_only_a_gpu_is_given_options(monkeypatch, backend, asked):
    calls = []
    monkeypatch.setattr(jax, "default_backend", lambda: backend)
    monkeypatch.setattr(generate, "_one_graph", lambda: calls.append(1))
    generate._device_loop.cache_clear()
    try:
        generate.device_loop()
        generate.device_loop()
    finally:
        generate._device_loop.cache_clear()
    assert len(calls) == asked
