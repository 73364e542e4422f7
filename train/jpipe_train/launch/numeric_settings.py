"""The settings of JAX, XLA and Flax that change numerical results. They must be the same in all processes of a run."""

import enum
import os
import re

import jax

# Settings that may differ between processes: logs, caches, checks, waiting times, addresses, certificates; and devices, which are compared
# separately. All other settings must agree, also settings of later JAX versions: some change numbers, and a difference in the rest is a
# mistake as well.
_MAY_DIFFER = re.compile(
    r"jax_(compilation_cache|persistent_cache|share_binary|dump|explain|log|logging|pprint|traceback|tracer_error|captured_constants"
    r"|cross_host|transfer_guard|debug|check|cpu_get|include|mtls)(_.*)?"
    r"|(jax|mock)_.*(_visible_devices|_debug|_verbose_errors|_cache_errors|_cache_key|_processes|_proxy_envs|_min_ops)"
    r"|jax_(enable_checks|enable_compilation_cache|enable_preemption_service|enable_recoverability|thread_guard"
    r"|array_garbage_collection_guard|hlo_source_file_canonicalization_regex|source_url_schema|send_traceback_to_runtime"
    r"|distributed_debug|distributed_verify_secure_credentials|default_device|num_cpu_devices|platforms|platform_name|pjrt_client_create_options)"
)
_VARIABLES = "LIBTPU_INIT_ARGS", "NVIDIA_TF32_OVERRIDE"
_PREFIXES = "FLAX_", "NNX_"  # what the names of Flax's variables begin with
_FLAGS_THAT_MAY_DIFFER = ("--xla_dump_", "--xla_force_host_platform_device_count")  # XLA flags


def numeric_settings() -> dict[str, str]:
    """Return each setting as text; the keys are the names that users know."""
    of_jax = {
        name: str(value)
        for name, value in sorted(jax.config.values.items())
        # Other values could print differently in each process.
        if not _MAY_DIFFER.fullmatch(name) and isinstance(value, (bool, int, float, str, enum.Enum, type(None)))
    }
    of_flax = {name: value for name, value in sorted(os.environ.items()) if name.startswith(_PREFIXES)}
    variables = {name: os.environ.get(name, "") for name in _VARIABLES}
    flags = [flag for flag in os.environ.get("XLA_FLAGS", "").split() if not flag.startswith(_FLAGS_THAT_MAY_DIFFER)]
    return of_jax | of_flax | variables | {"XLA_FLAGS": " ".join(flags)}
