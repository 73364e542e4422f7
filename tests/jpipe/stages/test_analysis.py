"""Programs that are compiled for analysis: XLA's options for them, where a version of XLA or a program does not accept them."""

from unittest import mock

import jax
import jax.numpy as jnp
import pytest

from jpipe.stages import compile_for_analysis

PLAIN = {"xla_gpu_autotune_level": 0}


def compile_for(platform, *, unknown=(), fails=lambda options: False):
    """Return the options with which a program is compiled, in order, by an XLA without some options."""
    tried = []

    def compile(options=None):
        tried.append(None if options is None else dict(options))
        for name in options or ():
            if name in unknown:
                raise jax.errors.JaxRuntimeError(f"INVALID_ARGUMENT: No such compile option: '{name}'")
        if fails(options):
            raise jax.errors.JaxRuntimeError("INTERNAL: it cannot be compiled")
        return mock.Mock(spec=jax.stages.Compiled)

    compile_for_analysis(mock.Mock(spec=jax.stages.Lowered, compile=compile), mock.Mock(spec=jax.Device, platform=platform))
    return tried


def test_kernels_are_made_with_little_effort_and_kept_in_a_file():
    (options,) = compile_for("gpu")
    assert options.items() > PLAIN.items()
    assert options["xla_backend_optimization_level"] == 0
    assert compile_for("gpu") == [options]  # the same file


def test_options_that_xla_does_not_know_are_left_out():
    (known,), unknown = compile_for("gpu"), {"xla_force_config", "xla_gpu_kernel_cache_file"}
    *_, options = tried = compile_for("gpu", unknown=unknown)
    assert options == {name: value for name, value in known.items() if name not in unknown}
    assert len(tried) == 3


def test_a_program_that_cannot_be_compiled_with_these_options_is_compiled_without():
    assert compile_for("gpu", fails=lambda options: options != PLAIN)[1:] == [PLAIN]
    with pytest.raises(jax.errors.JaxRuntimeError, match="it cannot be compiled"):
        compile_for("gpu", fails=lambda options: True)


def test_for_cpus_nothing_is_optimized_and_the_memory_is_the_same():
    assert compile_for("cpu") == [{"xla_backend_optimization_level": 0}]
    program = jax.jit(jax.grad(lambda x: jnp.sum(jnp.tanh(x @ x) @ x))).lower(jnp.ones((64, 64)))
    found, expected = (each.memory_analysis() for each in (compile_for_analysis(program, jax.devices("cpu")[0]), program.compile()))
    assert found.temp_size_in_bytes == expected.temp_size_in_bytes > 0


def test_programs_of_a_tpu_prefetch_nothing_for_their_next_run():
    assert compile_for("tpu") == [{"xla_max_cross_program_prefetches": 0}]
    assert compile_for("other") == [{}]
