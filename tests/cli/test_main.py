"""Start, settings of the process, failures."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import get_args

import pytest
from safetensors.numpy import load_file, save_file

from tfm_jax import cli
from tfm_jax.cli.options import Method, SamplingOptions, TreeOptions
from tfm_jax.cli.runtime import keep_compiled_programs, limit_gpu_memory
from tfm_jax.config import Sampling, TreeConfig
from tfm_jax.decoding.round import METHODS

ROOT = Path(__file__).parents[2]
START = "import sys; from tfm_jax.cli import main; "


def python(code: str, **options) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, "-c", START + code],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stderr=subprocess.PIPE,
        text=True,
        **options,
    )


def test_help_names_the_commands_without_importing_jax():
    code = """
try:
    main(["--help"])
finally:
    heavy = {"jax", "flax", "numpy"} & set(sys.modules)
    assert not heavy, heavy
"""
    out, err = (process := python(code, stdout=subprocess.PIPE)).communicate()
    assert process.returncode == 0, err
    for name in cli.COMMANDS:
        assert name in out


def test_a_closed_pipe_ends_quietly():
    process = python("sys.stdin.readline(); sys.exit(main(['--help']))", stdin=-1, stdout=-1)
    process.stdout.close()
    _, err = process.communicate("go\n")
    assert (process.returncode, err) == (141, "")


def test_options_are_those_of_the_library():
    assert get_args(Method) == METHODS
    for options, config in ((TreeOptions, TreeConfig), (SamplingOptions, Sampling)):
        assert options().config() == config()
        names = [field.name for field in dataclasses.fields(config)]
        assert [field.name for field in dataclasses.fields(options)] == names


def test_bench_passes_its_options_on(run, monkeypatch, tmp_path):
    folder = tmp_path / "experiments"
    folder.mkdir()
    monkeypatch.setattr(sys.modules["tfm_jax.cli.bench"], "ROOT", tmp_path)
    result = run("bench", "kernels")
    assert (result.status, result.out) == (2, "")
    assert "come with the repository alone" in result.err
    seen = tmp_path / "seen"
    record = f"open({str(seen)!r}, 'w').write(' '.join(sys.argv[1:]))"
    for name in ("kernels", "step"):
        (folder / f"{name}.py").write_text(f"import sys\n{record}\nsys.exit(7)\n")
    assert run("bench", "kernels", "--ops", "top_k", "--sweep", "--json").status == 7
    assert seen.read_text() == "--ops top_k --sweep --json"
    assert run("bench", "kernels", "--compile-seconds", "7.5").status == 7
    assert seen.read_text() == "--compile-seconds 7.5"
    assert run("bench", "step", "--budgets", "3", "5", "--out", str(tmp_path)).status == 7
    assert seen.read_text() == f"--budgets 3 5 --out {tmp_path}"
    flags = ("--all-contexts", "--no-phases", "--no-profile")
    assert run("bench", "step", *flags).status == 7
    assert seen.read_text() == " ".join(flags)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("kernels", "--preset", "pocket"), "--preset belongs to `tfm bench step`"),
        (("step", "--sweep"), "--sweep belongs to `tfm bench kernels`"),
        (("kernels", "--no-phases"), "--no-phases belongs to `tfm bench step`"),
    ],
)
def test_bench_refuses_options_of_the_other(run, arguments, message):
    result = run("bench", *arguments)
    assert result.status == 2
    assert message in result.err


def test_compiled_programs_are_kept_where_the_user_says(monkeypatch):
    for name in ("JAX_COMPILATION_CACHE_DIR", "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    keep_compiled_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/somewhere/tfm_jax/compile"
    assert os.environ["JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS"] == "0"
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/elsewhere")
    keep_compiled_programs()
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == "/elsewhere"
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR")
    monkeypatch.delenv("XDG_CACHE_HOME")
    keep_compiled_programs()
    expected = Path.home() / ".cache" / "tfm_jax" / "compile"
    assert os.environ["JAX_COMPILATION_CACHE_DIR"] == str(expected)


def test_gpu_memory_is_limited_before_jax_or_not_at_all(monkeypatch):
    with pytest.raises(ValueError, match="imported already"):
        limit_gpu_memory(0.3)
    monkeypatch.delitem(sys.modules, "jax")
    monkeypatch.setenv("XLA_PYTHON_CLIENT_MEM_FRACTION", "0.9")
    limit_gpu_memory(0.3)
    assert os.environ["XLA_CLIENT_MEM_FRACTION"] == "0.3"
    assert "XLA_PYTHON_CLIENT_MEM_FRACTION" not in os.environ
    with pytest.raises(ValueError, match="must lie in"):
        limit_gpu_memory(1.5)


def failing(error: BaseException):
    def command() -> None:
        raise error

    return command


def test_ctrl_c(run, monkeypatch):
    last = []
    monkeypatch.setattr("atexit.register", lambda *call: last.append(call))
    monkeypatch.setitem(cli.COMMANDS, "info", failing(KeyboardInterrupt()))
    assert run("info") == (130, "", "")
    assert last == [(os._exit, 130)]


@pytest.mark.parametrize(
    "error",
    [RuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 99 bytes."), MemoryError()],
)
def test_out_of_memory_names_what_to_reduce(run, monkeypatch, error):
    monkeypatch.setitem(cli.COMMANDS, "info", failing(error))
    result = run("info")
    assert result.status == 2
    for what in ("--max-new-tokens", "--budget", "--dtype bfloat16", "--memory-fraction"):
        assert what in result.err
    assert result.err.count("\n") == 1


def test_an_internal_error_keeps_its_traceback(run, monkeypatch):
    monkeypatch.setitem(cli.COMMANDS, "info", failing(RuntimeError("INTERNAL: a bug")))
    with pytest.raises(RuntimeError, match="a bug"):
        run("info")
    monkeypatch.setitem(cli.COMMANDS, "info", failing(ValueError("also\nwanted")))
    assert run("info").err == "error: also wanted\n"
    monkeypatch.setenv("TFM_DEBUG", "1")
    with pytest.raises(ValueError, match="wanted"):
        run("info")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", ""], "a prompt needs at least one token"),
        (["generate", "x", "--budget", "0"], "budget must be a positive integer, got 0"),
        (["generate", "x", "--budget", "-4"], "budget must be a positive integer, got -4"),
        (["generate", "x", "--temperature", "nan"], "temperature must be finite"),
        (["generate", "x", "--top-p", "0"], "top_p must lie in (0, 1], got 0.0"),
        (["generate", "x", "--max-new-tokens", "-1"], "max_new_tokens must not be negative"),
        (["generate", "x", "--max-new-tokens", "400"], "make 401, but the model's limit is 400"),
        (["generate", "x " * 500], "but the model's limit is 400"),
        (["generate", "7 8192", "--token-ids"], "must lie in 0..8191, got [8192]"),
        (["generate", "7 -1", "--token-ids"], "must lie in 0..8191, got [-1]"),
        (["generate", "7 x", "--token-ids"], "--token-ids expects integers, got '7 x'"),
        (["generate", "x", "--tree-round", "0"], "--tree-round counts from 1"),
        (["generate", "x", "--tree-round", "2"], "--tree-round needs --show-tree"),
        (["compare", "x", ""], "a prompt needs at least one token"),
        (["compare", "x", "--children", "0"], "children must be a positive integer"),
        (["compare", "--token-ids"], "the built-in ones are text"),
    ],
)
def test_bad_input_is_one_line(run, trio_dir, arguments, message):
    status, out, err = run(*arguments, "--model", str(trio_dir), "--json")
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert message in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "x", "--method", "medusa"], "invalid choice 'medusa'"),
        (["generate", "x", "--dtype", "int8"], "invalid choice 'int8'"),
        (["generate", "x", "--bugdet", "9"], "--bugdet"),
        (["generate"], "PROMPT"),
        (["paint"], "Unrecognized options: paint"),
    ],
)
def test_bad_options_are_refused_by_the_parser(run, arguments, message):
    status, out, err = run(*arguments)
    assert (status, out) == (2, "")
    assert message in err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "holds no prompt"),
        ('{"prompt": "a"}\nnonsense\n', "prompts.jsonl:2 is not JSON"),
        ('{"text": "a"}\n', 'prompts.jsonl:1: expected an object with "prompt"'),
        ('{"tokens": [1, 99999]}\n', "must lie in 0..8191, got [99999]"),
        ('{"tokens": [1.5]}\n', "token ids must be integers"),
    ],
)
def test_bad_prompt_files(run, trio_dir, tmp_path, text, message):
    file = tmp_path / "prompts.jsonl"
    file.write_text(text)
    status, out, err = run("compare", "--prompts", str(file), "--model", str(trio_dir))
    assert (status, out) == (2, "")
    assert message in err
    assert "No such file" in run("compare", "--prompts", str(tmp_path / "none")).err


def change(path: Path, edit) -> None:
    if path.suffix == ".json":
        value = json.loads(path.read_text())
        edit(value)
        path.write_text(json.dumps(value))
    else:
        tensors = load_file(path)
        edit(tensors)
        save_file(tensors, path)


def truncate(root: Path) -> None:
    file = root / "verifier" / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (truncate, "model.safetensors"),
        (lambda root: (root / "dflash" / "model.safetensors").unlink(), "dflash"),
        (
            lambda root: change(
                root / "verifier" / "model.safetensors", lambda t: t.pop("model.norm.weight")
            ),
            "norm.weight is missing",
        ),
        (
            lambda root: change(
                root / "dflash" / "config.json", lambda c: c.update(num_target_layers=9)
            ),
            "num_target_layers is 9, the verifier's num_hidden_layers is 2",
        ),
        (
            lambda root: (root / "verifier" / "tokenizer.json").write_text("{}"),
            "not a readable tokenizer",
        ),
        (
            lambda root: (root / "verifier" / "tokenizer.json").unlink(),
            "no tokenizer: give the prompt as",
        ),
    ],
)
def test_damaged_models_are_refused(run, damaged, damage, message):
    damage(damaged)
    status, out, err = run("generate", "x", "--model", str(damaged))
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


def test_a_model_that_is_not_there(run, tmp_path):
    for command in (["generate", "x", "--model"], ["info", "--model"], ["verify"]):
        status, _, err = run(*command, str(tmp_path / "none"))
        assert status == 2
        assert err.startswith(f"error: {tmp_path / 'none'}: no such directory; ")
        assert err.count("\n") == 1
