"""The cache manager: pages and slots of the two memories, shared between requests by prefix.

Plain Python on the host. `CacheManager` says what each step reads, copies and keeps; a runner does
it on the device (`StepPlan`).
"""

from k3jax.cache.events import CacheEvent
from k3jax.cache.hashing import HashChain, ImageSpan, Root, check_cache_salt, image_digest
from k3jax.cache.manager import CacheManager
from k3jax.cache.report import CacheReport, CacheStats
from k3jax.cache.request import Admission, CacheRequest, Defer, Hit, Miss, NoSpace
from k3jax.cache.settings import CacheSettings, parse_retention_interval, split_memory
from k3jax.cache.step import Export, PageCopy, Pass, RowPlan, RowResult, SlotCopy, StepPlan

__all__ = [
    "Admission",
    "CacheEvent",
    "CacheManager",
    "CacheReport",
    "CacheRequest",
    "CacheSettings",
    "CacheStats",
    "Defer",
    "Export",
    "HashChain",
    "Hit",
    "ImageSpan",
    "Miss",
    "NoSpace",
    "PageCopy",
    "Pass",
    "Root",
    "RowPlan",
    "RowResult",
    "SlotCopy",
    "StepPlan",
    "check_cache_salt",
    "image_digest",
    "parse_retention_interval",
    "split_memory",
]
