"""Random traffic on one long-lived cache manager: what it reads is checked, memory must stay flat.

Every row compares all that it reads with the tokens of its request (k3jax/cache/simulation.py), so
that the rate is that of the check, not of the manager. Exit code 1 if resident memory grew.

python scripts/fuzz_cache.py --operations 1000000
"""

import random
import resource
import sys
import time
from dataclasses import dataclass

from k3jax.cache import CacheSettings
from k3jax.cache.settings import parse_retention_interval
from k3jax.cache.simulation import Simulation, random_operation
from k3jax.flags import parse_flags


@dataclass
class Flags:
    """Fuzzes the cache manager against a model of the device."""

    operations: int = 1_000_000  # calls of the manager
    seed: int = 0  # of the traffic
    num_pages: int = 96  # MLA pages, the reserved one included
    num_slots: int = 24  # KDA slots, the reserved one included
    page_size: int = 8  # tokens in a page
    match_unit: int = 4  # tokens between places where a prefix may hit
    kda_chunk: int = 8  # a prefill exports states at multiples of this
    retention_interval: str = "0"  # dense, or tokens between states that are kept
    max_len: int = 96  # tokens of a request
    async_depth: int = 1  # steps dispatched before the first of them is committed
    check_every: int = 100  # operations between checks of all invariants
    growth_limit: float = 0.02  # share by which memory may grow after the first fifth


def fuzz(flags: Flags) -> bool:
    """Runs the traffic and prints how it goes; whether memory stayed flat."""
    settings = CacheSettings(
        num_pages=flags.num_pages,
        num_slots=flags.num_slots,
        page_size=flags.page_size,
        match_unit=flags.match_unit,
        kda_chunk=flags.kda_chunk,
        retention_interval=parse_retention_interval(flags.retention_interval),
    )
    print(settings.describe())
    simulation = Simulation(
        settings,
        random.Random(flags.seed).randrange,
        depth=flags.async_depth,
        max_len=flags.max_len,
    )
    start, next_check, next_line, memory = time.perf_counter(), 0, 0, {}
    while simulation.operations < flags.operations:
        random_operation(simulation)
        done = simulation.operations
        if done >= next_check:
            simulation.check()
            next_check = done + flags.check_every
        if done >= next_line:
            memory[done] = resident_bytes()
            print_line(simulation, done / max(time.perf_counter() - start, 1e-9), memory[done])
            next_line = done + max(flags.operations // 20, 1)
    simulation.drain()
    simulation.check()
    memory[simulation.operations] = resident_bytes()
    print_line(simulation, simulation.operations / (time.perf_counter() - start), resident_bytes())
    print_counts(simulation)
    settled = [size for done, size in memory.items() if done >= flags.operations / 5]
    growth = settled[-1] / settled[0] - 1
    print(f"memory grew by {growth:.2%} after the first fifth (limit {flags.growth_limit:.2%})")
    return growth <= flags.growth_limit


def resident_bytes() -> int:
    """Memory of this process now; where the system does not tell, the most it ever had."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def print_line(simulation: Simulation, rate: float, memory: int) -> None:
    stats, usage = simulation.manager.stats, simulation.manager.usage()
    print(
        f"{simulation.operations:>9} operations  {rate:>7.0f}/s  {memory / 2**20:>6.1f} MiB  "
        f"{stats.queries:>7} requests  {stats.hits:>6} hits  "
        f"pages {usage['pages'].referenced}+{usage['pages'].idle}  "
        f"slots {usage['slots'].referenced}+{usage['slots'].idle}",
        flush=True,
    )


def print_counts(simulation: Simulation) -> None:
    stats = simulation.manager.stats
    evictions = {f"{group} {cause}": n for (group, cause), n in stats.evictions.most_common()}
    for name, value in {
        "states stored": dict(stats.snapshots.most_common()),
        "states not stored": dict(stats.skipped_snapshots.most_common()),
        "removed": evictions,
        "misses": {miss.name.lower(): n for miss, n in stats.misses.most_common()},
        "hit tokens": f"{stats.hit_tokens} of {stats.query_tokens}",
        "page copies": stats.page_copies,
        "requests that waited": stats.deferrals,
        "rows not finite": stats.nonfinite_rows,
        "pins refused": stats.pins_refused,
        "restarts": simulation.manager.epoch,
    }.items():
        print(f"{name}: {value}")


def main() -> int:
    return 0 if fuzz(parse_flags(Flags)) else 1


if __name__ == "__main__":
    sys.exit(main())
