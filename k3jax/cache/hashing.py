"""What identifies a prefix: a root for all that changes the bytes in the cache, then a hash chain.

    h_0 = H(root),   h_{i+1} = H(h_i | token ids of unit i, int32 little-endian | images in unit i)

H is BLAKE2b-256. A hash stands for the whole prefix up to the end of its unit; an incomplete unit
has none. Every field of variable length carries its length, so that no two inputs encode alike.
"""

import functools
import hashlib
import operator
import struct
from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np

from k3jax.errors import RequestError

MAX_SALT_BYTES = 256
LAYOUT_VERSION = 1  # of pages [page, R] and slots [H, K, V]; a change makes all old keys unknown


def _encode(value: str | int | bytes | tuple | None) -> bytes:
    """A value with its type and length in front."""
    match value:
        case None:
            return b"n"
        case int():
            return b"i" + _encode(str(int(value)))
        case str():
            data = value.encode("utf-8", "surrogatepass")
            return b"s" + struct.pack("<Q", len(data)) + data
        case bytes():
            return b"b" + struct.pack("<Q", len(value)) + value
        case tuple():
            return b"t" + struct.pack("<Q", len(value)) + b"".join(map(_encode, value))
    raise TypeError(f"a {type(value).__name__} cannot be part of a cache key")


def _hash(purpose: bytes, *parts: bytes) -> bytes:
    state = hashlib.blake2b(digest_size=32, person=purpose)
    for part in parts:
        state.update(part)
    return state.digest()


@dataclass(frozen=True)
class Root:
    """Everything that changes the bytes in the cache for the same tokens, and who may share them.

    Different roots never hit each other (tenants by salt, adapters, weight versions, dtypes).
    """

    model: str  # fingerprint: digest of the configuration and the weights
    weight_version: int | str = 0
    tokenizer: str = ""  # revision of tokenizer and renderer
    mla_dtype: str = "bfloat16"
    mla_scales: tuple[str, ...] = ()  # one a layer where MLA rows are fp8, as exact text
    state_dtype: str = "float32"
    conv_layout: str = "q,k,v [W-1, H, d]"
    layout_version: int = LAYOUT_VERSION
    adapter: tuple[str, int | str] | None = None  # id and version
    cache_salt: str | None = field(default=None, repr=False)  # a secret: never logged
    trust_domain: str = ""

    @functools.cached_property
    def digest(self) -> bytes:
        """h_0."""
        values = tuple((f.name, getattr(self, f.name)) for f in fields(self))
        return _hash(b"k3jax.root", _encode(values))


def check_cache_salt(salt: object) -> str | None:
    """The request field `cache_salt`, where None stands for a request without one."""
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError("cache_salt must be a string that is not empty", field="cache_salt")
    if len(salt.encode("utf-8", "surrogatepass")) > MAX_SALT_BYTES:
        raise RequestError(
            f"cache_salt must not be longer than {MAX_SALT_BYTES} bytes", field="cache_salt"
        )
    return salt


def image_digest(rgb: np.ndarray, preprocessing: str) -> bytes:
    """Identity of an image: its decoded pixels [H, W, 3] uint8, size, and how they are prepared."""
    if rgb.dtype != np.uint8 or rgb.ndim != 3:
        raise ValueError(f"pixels must be uint8 [H, W, 3], not {rgb.dtype} {list(rgb.shape)}")
    pixels = np.ascontiguousarray(rgb)
    return _hash(b"k3jax.image", _encode((*rgb.shape, preprocessing)), pixels.data)


@dataclass(frozen=True)
class ImageSpan:
    """An image's placeholder tokens: positions [start, start + length) and what they show."""

    digest: bytes
    start: int
    length: int


class HashChain:
    """The tokens of a request, prompt and output, and the hash of every complete unit of them.

    Owned by the request and kept when it is preempted. `extend` takes final tokens only: what was
    drafted, or computed past a stop, never gets here (C-10). Costs O(new tokens) (S-13).
    """

    def __init__(
        self,
        root: Root,
        match_unit: int,
        tokens: Iterable[int] = (),
        images: Sequence[ImageSpan] = (),
    ):
        self.root = root
        self.match_unit = match_unit
        self.tokens = array("i")  # read it, but add tokens by `extend`
        self.hashes: list[bytes] = []  # hashes[i] stands for tokens[: (i + 1) * match_unit]
        self._images = sorted(images, key=operator.attrgetter("start"))
        self._next_image = 0  # the first that does not end before the units hashed so far
        self.extend(tokens)

    def __len__(self) -> int:
        return len(self.tokens)

    def extend(self, tokens: Iterable[int]) -> None:
        """Appends final tokens. Negative ids, and those above int32, are refused."""
        new = array("i", tokens)
        if new and min(new) < 0:
            raise ValueError(f"token id {min(new)} is negative")
        self.tokens.extend(new)
        unit = self.match_unit
        while (len(self.hashes) + 1) * unit <= len(self.tokens):
            start = len(self.hashes) * unit
            ids = np.asarray(self.tokens[start : start + unit], dtype="<i4").tobytes()
            previous = self.hashes[-1] if self.hashes else self.root.digest
            self.hashes.append(_hash(b"k3jax.unit", previous, ids, *self._images_in(start)))

    def copy(self) -> "HashChain":
        """A chain of its own with the same tokens, for another continuation."""
        other = HashChain(self.root, self.match_unit, (), self._images)
        other.tokens, other.hashes = self.tokens[:], self.hashes[:]
        other._next_image = self._next_image
        return other

    def _images_in(self, start: int) -> list[bytes]:
        """Images that overlap the unit at `start`: placeholder tokens all look alike."""
        while self._next_image < len(self._images):
            image = self._images[self._next_image]
            if image.start + image.length > start:
                break
            self._next_image += 1
        found, index = [], self._next_image
        while index < len(self._images) and self._images[index].start < start + self.match_unit:
            image = self._images[index]
            found.append(_encode((image.digest, image.start - start)))
            index += 1
        return found
