"""Compiled programs kept between starts."""

import jax

from k3jax.paths import user_cache


def enable_compile_cache() -> None:
    """Keeps every compiled program in the user's cache folder, unless JAX already has a place.

    A setting of the whole process: for programs, not for code that runs in somebody's notebook.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
