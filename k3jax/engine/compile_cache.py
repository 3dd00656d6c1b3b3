"""Compiled programs kept between starts, and a count of compilations."""

import jax

from k3jax.paths import user_cache

_COMPILATION = "/jax/core/compile/backend_compile_duration"
_count = 0
_listening = False


def enable_compile_cache() -> None:
    """Keeps every compiled program in the user's cache folder, unless JAX already has a place.

    A setting of the whole process: for programs, not for code that runs in somebody's notebook.
    """
    if jax.config.jax_compilation_cache_dir is None:
        jax.config.update("jax_compilation_cache_dir", str(user_cache() / "xla"))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)


def num_compilations() -> int:
    """Programs that this process compiled, or loaded from the cache, since the first call."""
    global _listening
    if not _listening:
        _listening = True
        jax.monitoring.register_event_duration_secs_listener(_on_event)
    return _count


def _on_event(name: str, duration_s: float, **_: object) -> None:
    global _count
    _count += name == _COMPILATION
